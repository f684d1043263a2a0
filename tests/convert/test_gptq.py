"""The solver on awkward Hessians: dead, duplicate and missing inputs."""

import pytest
import torch
from hessians import G, draft, make_hessian, make_weights, target

from edge_runtime.convert import quantize as qz
from edge_runtime.convert.gptq import factor_hessian
from edge_runtime.errors import CheckpointError


def test_dead_column_is_rounded_to_nearest() -> None:
    H = make_hessian(64)
    H[7] = H[:, 7] = 0
    factor = factor_hessian(H)
    assert factor.dead == 1
    W = make_weights(20, 64)
    scales = qz.fit_scales(W, G)
    q4 = qz.solve_base(W, factor, *scales, G, bound=None)
    rtn = qz.solve_base(W, None, *scales, G, method="rtn")
    assert torch.equal(q4[:, 7], rtn[:, 7])
    assert not torch.equal(q4, rtn)


@pytest.mark.parametrize("kind", ["duplicate columns", "one sample", "nothing seen", "tiny"])
def test_singular_hessian(kind: str) -> None:
    H = make_hessian(64)
    if kind == "duplicate columns":
        H[1] = H[0]
        H[:, 1] = H[:, 0]
    elif kind == "one sample":
        x = torch.randn(64, 1, generator=torch.Generator().manual_seed(0))
        H = x @ x.T
    elif kind == "nothing seen":
        H = torch.zeros(64, 64)
    else:
        H *= 1e-30
    factor = factor_hessian(H)
    assert factor.dead == (64 if kind == "nothing seen" else 0)
    W = make_weights(20, 64)
    scales = qz.fit_scales(W, G)
    q4 = qz.solve_base(W, factor, *scales, G)
    qr = qz.solve_refine(W, factor, q4, *scales, G).codes
    rtn = qz.solve_base(W, None, *scales, G, method="rtn")
    if kind == "nothing seen":
        assert torch.equal(q4, rtn)
        return
    unit = H / H.diagonal().mean()
    solved, nearest = (qz.relative_error(W, draft(W, q, scales), unit) for q in (q4, rtn))
    assert solved < nearest
    assert qz.relative_error(W, target(W, q4, qr, scales), unit) < 2e-3


def test_damping_is_raised_and_reported() -> None:
    H = make_hessian(48)
    eigenvalues, V = torch.linalg.eigh(H.double())
    eigenvalues[0] = -0.05 * H.diagonal().mean()
    assert factor_hessian((V * eigenvalues) @ V.T).damping == 0.1
    assert factor_hessian(H).damping == 0.01
    with pytest.raises(CheckpointError, match=r"layers\.3\.qkv"):
        factor_hessian(torch.eye(8) - torch.ones(8, 8) * 0.9, name="layers.3.qkv")
