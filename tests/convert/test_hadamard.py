"""Hadamard matrices by construction, and the rotations made of them."""

import pytest
import torch

from edge_runtime.convert.hadamard import Rotation, hadamard, random_rotation
from edge_runtime.errors import UnsupportedModel

ORDERS = (1, 2, 4, 8, 12, 20, 28, 32, 36, 64, 80, 96, 128, 576, 640, 896, 960, 1024, 1152, 1536)
PINNED_SIGNS = [-1, 1, 1, -1, 1, 1, 1, 1, 1, 1, 1, -1]
LARGE_ORDERS = (1920, 2048, 2304, 2560, 2880, 3072, 3584, 4096, 5120)


@pytest.mark.parametrize("n", ORDERS)
def test_rows_are_orthogonal(n: int) -> None:
    H = hadamard(n)
    assert H.dtype == torch.int8
    assert H.shape == (n, n)
    assert bool((H.abs() == 1).all())
    product = H.float() @ H.float().T  # integers far below 2^24: exact
    assert torch.equal(product, n * torch.eye(n))


@pytest.mark.parametrize("n", LARGE_ORDERS)
def test_large_orders_exist(n: int) -> None:
    H = hadamard(n)
    assert H.shape == (n, n)
    assert bool((H.abs() == 1).all())
    rows = H[:: n // 16 or 1].float()
    dots = rows @ H.float().T
    assert int((dots != 0).sum()) == rows.shape[0]
    assert float(dots.amax()) == n


@pytest.mark.parametrize("n", [3, 6, 18, 50, 92, 200 + 2, 577])
def test_missing_order_is_refused_by_number(n: int) -> None:
    with pytest.raises(UnsupportedModel, match=str(n)):
        hadamard(n)


@pytest.mark.parametrize(("n", "kind"), [(64, "hadamard"), (96, "hadamard"), (92, "orthogonal")])
def test_rotation_is_orthogonal(n: int, kind: str) -> None:
    rotation = random_rotation(n, 3)
    R = rotation.dense()
    assert rotation.kind == kind
    assert rotation.size == n
    assert R.dtype == torch.float64
    assert rotation.matrix.dtype == (torch.int8 if kind == "hadamard" else torch.float32)
    error = (R @ R.T - torch.eye(n, dtype=torch.float64)).abs().max()
    assert float(error) < (1e-14 if kind == "hadamard" else 1e-6)


@pytest.mark.parametrize("n", [12, 64, 50])
def test_rotation_is_a_function_of_the_seed(n: int) -> None:
    first, again, other = (random_rotation(n, seed).matrix for seed in (7, 7, 8))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_rotation_does_not_touch_the_global_generator() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    random_rotation(64, 5)
    assert torch.equal(torch.rand(3), expected)


def test_signs_of_a_seed_are_pinned() -> None:
    """The same on every machine: a change here breaks reproducible conversion."""
    rotation = random_rotation(12, 0)
    plain = hadamard(12)
    signs = (rotation.matrix // plain)[:, 0]
    assert torch.equal(rotation.matrix, signs[:, None] * plain)
    assert signs.tolist() == PINNED_SIGNS
    assert isinstance(rotation, Rotation)
