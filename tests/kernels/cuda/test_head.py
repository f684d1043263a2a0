"""Argmax and n-gram look-up in Triton: the ids of the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton_devices import DEVICES, device_of

from edge_runtime.decode.draft import NgramDraft
from edge_runtime.kernels.reference.ops import TorchLogits


def packed(ids: np.ndarray, V: int) -> torch.Tensor:
    """Bits of the allowed tokens, int32 words."""
    bits = np.zeros(-(-V // 32) * 32, bool)
    bits[ids] = True
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32).copy())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("V", [1, 2, 31, 2047, 2048, 2049, 6007])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_argmax(rows: int, V: int, device: str) -> None:
    device_of(device)
    from edge_runtime.kernels.cuda import head

    rng = np.random.default_rng(V)
    for kind in range(4):
        logits = torch.full((rows, V + 5), float("nan"))  # what lies behind never counts
        values = rng.standard_normal((rows, V)) * 10
        if kind == 1:
            values = np.round(values / 10)  # ties, and zeros of both signs
        if kind == 2:
            values = -np.abs(values) * 1e36
        if kind == 3:
            values = np.where(rng.random((rows, V)) < 0.5, 0.0, -0.0)
        logits[:, :V] = torch.from_numpy(values.astype(np.float32))
        reference = TorchLogits(logits[:, :V])
        out = head.new_choice(rows, V, device)
        for tensor in (out.index, out.finite, out.partial, out.flags):
            tensor.fill_(99)
        head.argmax(logits.to(device), V, out=out)
        assert out.index.tolist() == reference.argmax()
        assert out.finite.tolist() == [1] * rows
        allowed = np.unique(rng.integers(0, V, 7))
        head.argmax(logits.to(device), V, packed(allowed, V).to(device), out)
        assert out.index.tolist() == reference.argmax(allowed)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_flagged(bad: float, device: str) -> None:
    device_of(device)
    from edge_runtime.kernels.cuda import head

    for at in (0, 2050, 4098):
        logits = torch.zeros(3, 4100)
        logits[1, at] = bad
        out = head.argmax(logits.to(device), 4099)
        assert out.finite.tolist() == [1, 0, 1]
        assert 0 <= int(out.index[1]) < 4099
        assert head.argmax(logits.to(device), at).finite.tolist() == [1, 1, 1] if at else True


@pytest.mark.parametrize("device", DEVICES)
def test_ngram_look_up(device: str) -> None:
    device_of(device)
    from edge_runtime.kernels.cuda import ngram

    rng = np.random.default_rng(0)
    capacity = 1400
    out = ngram.new_draft(capacity, device)
    found = 0
    for trial in range(80):
        length = int(rng.choice([0, 1, 2, 3, 4, 5, 9, 40, 1023, 1024, 1025, 1300]))
        text = rng.integers(-1 if trial % 3 else 0, rng.choice([2, 4, 30]), length).tolist()
        head = rng.integers(0, 3, rng.integers(0, 5)).tolist() if trial % 2 else []
        gamma = int(rng.integers(0, 8))
        source = NgramDraft()
        source.propose(text, length, 0)
        want = source.extend(text, head, gamma)
        tokens = torch.full((capacity,), 1, dtype=torch.int32)
        tokens[:length] = torch.tensor(text, dtype=torch.int32)
        drafted = torch.tensor([*head, 0], dtype=torch.int32, device=device)
        sizes = torch.tensor([length, len(head)], dtype=torch.int32, device=device)
        out.ids.fill_(99)
        ngram.look_up(tokens.to(device), sizes[:1], drafted, sizes[1:], gamma, out)
        assert out.ids[: int(out.count)].tolist() == want, (text, head, gamma)
        found += bool(want)
    assert found > 10
