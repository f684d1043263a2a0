"""Quantised activations: quantise, RMSNorm + quantise, silu·mul + quantise.

Invariant: a row's result depends on that row alone: block size and warps follow from its length,
never from how many rows there are. Output of each, for K inputs padded to Kp by groups of G:
codes int8 [M, Kp] (zero from K on), scale fp32 [M], group sums of the codes int32 [M, Kp/G].
A row with NaN or infinity gets codes 0 and scale NaN, which the next linear passes on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from edge_runtime.kernels.cuda.launch import EXACT, Kernel, cdiv, power_of_two
from edge_runtime.kernels.cuda.sizes import SILU_CHUNK as CHUNK
from edge_runtime.kernels.layout import padded

quantise_kernel = Kernel("activation_kernels", "quantise_kernel", pdl=True)
norm_quantise_kernel = Kernel("activation_kernels", "norm_quantise_kernel", pdl=True)
silu_mul_kernel = Kernel("activation_kernels", "silu_mul_kernel", pdl=True)
quantise_chunks_kernel = Kernel("activation_kernels", "quantise_chunks_kernel", pdl=True)

MAX_BLOCK = 32768  # longest row held in registers: 16 warps with 64 numbers a thread


@dataclass(frozen=True, slots=True)
class Activation:
    """codes int8 [M, Kp], scale fp32 [M], sums int32 [M, Kp/G], on one device."""

    codes: Tensor
    scale: Tensor
    sums: Tensor


def new_activation(
    rows: int, num_inputs: int, group_size: int, device: torch.device | str
) -> Activation:
    """Allocate room for `rows` rows of `num_inputs` numbers."""
    Kp = padded(num_inputs, group_size)
    return Activation(
        torch.empty(rows, Kp, dtype=torch.int8, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
        torch.empty(rows, Kp // group_size, dtype=torch.int32, device=device),
    )


def block_of(num_inputs: int, group_size: int) -> int:
    """Return the block a row of this length is read as."""
    block = max(power_of_two(num_inputs), group_size)
    assert block <= MAX_BLOCK, f"a row of {num_inputs} numbers, at most {MAX_BLOCK} fit"
    return block


def quantise_shape(block: int) -> dict[str, int]:
    """Return the launch of `quantise_kernel`, as measured best at 1 and 8 rows (H200)."""
    return {"num_warps": min(max(block // 128, 1), 8 if block < MAX_BLOCK else 16)}


def norm_shape(block: int) -> dict[str, int]:
    """Return the launch of `norm_quantise_kernel`: every warp does the whole lane walk, so few."""
    warps = min(max(block // 128, 1), 4 if block <= 8192 else 16)
    return {"num_warps": warps, "UNROLL": min(max(block // 128, 8), 64)}


def quantise(x: Tensor, group_size: int, out: Activation | None = None) -> Activation:
    """Quantise rows. x: fp32 [M, K], contiguous."""
    M, K = x.shape
    assert x.is_contiguous()
    out = out or new_activation(M, K, group_size, x.device)
    block = block_of(K, group_size)
    quantise_kernel[(M,)](
        x, out.codes, out.scale, out.sums, K, padded(K, group_size),
        G=group_size, BLOCK=block, **quantise_shape(block), **EXACT,
    )  # fmt: skip
    return out


def norm_quantise(
    x: Tensor, eps: float, group_size: int, out: Activation | None = None
) -> Activation:
    """RMSNorm without weights, then quantise. x: fp32 [M, K], contiguous."""
    M, K = x.shape
    assert x.is_contiguous()
    out = out or new_activation(M, K, group_size, x.device)
    block = block_of(K, group_size)
    norm_quantise_kernel[(M,)](
        x, out.codes, out.scale, out.sums, K, padded(K, group_size), eps,
        G=group_size, BLOCK=block, **norm_shape(block), **EXACT,
    )  # fmt: skip
    return out


@dataclass(frozen=True, slots=True)
class SiluRoom:
    """Room of `silu_mul_quantise` between its two stages: y fp32 [M, stride >= F], which may be the
    input itself (then overwritten), and peaks int32 [M, chunks]."""

    y: Tensor
    peaks: Tensor


def new_silu_room(gate_up: Tensor, *, in_place: bool = False) -> SiluRoom:
    """Allocate room for an input fp32 [M, 2F]."""
    M, F = gate_up.shape[0], gate_up.shape[1] // 2
    peaks = torch.empty(M, cdiv(F, CHUNK), dtype=torch.int32, device=gate_up.device)
    return SiluRoom(gate_up if in_place else torch.empty_like(gate_up[:, :F]), peaks)


def silu_mul_quantise(
    gate_up: Tensor,
    group_size: int,
    out: Activation | None = None,
    room: SiluRoom | None = None,
) -> Activation:
    """silu(gate) · up, then quantise. gate_up: fp32 [M, 2F] = [gate | up], contiguous."""
    M, K = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous()
    out = out or new_activation(M, K, group_size, gate_up.device)
    room = room or new_silu_room(gate_up)
    chunks = cdiv(K, CHUNK)
    stride = room.y.stride(0)
    silu_mul_kernel[(M, chunks)](
        gate_up, room.y, room.peaks, K, stride, chunks, CHUNK=CHUNK, num_warps=4, **EXACT
    )
    quantise_chunks_kernel[(M, chunks)](
        room.y, room.peaks, out.codes, out.scale, out.sums, K, padded(K, group_size), stride,
        chunks, G=group_size, CHUNK=CHUNK, CHUNKS=power_of_two(chunks), num_warps=4,
        **EXACT,
    )  # fmt: skip
    return out
