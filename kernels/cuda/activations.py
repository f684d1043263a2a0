"""Quantised activations: quantise, RMSNorm + quantise, silu·mul + quantise.

Invariant: a row's result depends on that row alone: block size and warps follow from its length,
never from how many rows there are. Output of each, for K inputs padded to Kp by groups of G:
codes int8 [M, Kp] (zero from K on), scale fp32 [M], group sums of the codes int32 [M, Kp/G].
A row with NaN or infinity gets codes 0 and scale NaN, which the next linear passes on.

A row of the residual stream stays in registers from the first read to the codes. The sum of squares
has a fixed order (32 strided lanes ascending), so each warp walks it, re-reading the row from L1,
UNROLL loads at a time. A
feed-forward row is spread over programs, and its peak is found between two launches: on one
multiprocessor of an Orin it would take about 10 us.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from edge_runtime.kernels.cuda import require_triton
from edge_runtime.kernels.layout import padded

require_triton()

import triton  # noqa: E402 (the line above says what to install)
import triton.language as tl  # noqa: E402

from edge_runtime.kernels.cuda.numeric import (  # noqa: E402
    EXACT,
    LANES,
    codes_of,
    fold_lanes,
    peak_bits,
    quantiser,
    silu_mul,
)

MAX_BLOCK = 32768  # longest row held in registers: 16 warps with 64 numbers a thread
CHUNK = 1024  # of a feed-forward row, which is longer, for one program


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


@triton.jit
def _store_quantised(x, most, i, block, row, codes_ptr, scale_ptr, sums_ptr, Kp, G, BLOCK):
    """Write codes, scale and group sums of x fp32 [BLOCK], which is 0 from K on, at places i of
    block number `block`; most: bits of the whole row's peak."""
    inverse, scale = quantiser(most)
    codes = codes_of(x, inverse)
    tl.store(codes_ptr + row * Kp + i, codes.to(tl.int8), mask=i < Kp)
    tl.store(scale_ptr + row, scale, mask=block == 0)
    group = block * (BLOCK // G) + tl.arange(0, BLOCK // G)
    sums = tl.sum(tl.reshape(codes, (BLOCK // G, G)), 1)
    tl.store(sums_ptr + row * (Kp // G) + group, sums, mask=group < Kp // G)


@triton.jit
def quantise_kernel(
    x_ptr, codes_ptr, scale_ptr, sums_ptr, K, Kp, G: tl.constexpr, BLOCK: tl.constexpr
):
    """x fp32 [M, K]; one program a row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * K + i, mask=i < K, other=0.0)
    _store_quantised(x, peak_bits(x), i, 0, row, codes_ptr, scale_ptr, sums_ptr, Kp, G, BLOCK)


@triton.jit
def norm_quantise_kernel(
    x_ptr, codes_ptr, scale_ptr, sums_ptr, K, Kp, eps, G: tl.constexpr, BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """x fp32 [M, K] is divided by its root mean square first."""
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * K
    i = tl.arange(0, BLOCK)
    x = tl.load(x_row + i, mask=i < K, other=0.0)
    lane = tl.arange(0, LANES)
    total = tl.zeros((LANES,), tl.float32)
    for first in range(0, K, LANES * UNROLL):
        for step in tl.static_range(UNROLL):
            at = first + step * LANES + lane
            part = tl.load(x_row + at, mask=at < K, other=0.0)
            total = total + part * part
    size = (row * 0 + K).to(tl.float32)  # K may be a constant
    mean = tl.div_rn(fold_lanes(total), size)
    factor = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    y = tl.where(i < K, x * factor, 0.0)
    _store_quantised(y, peak_bits(y), i, 0, row, codes_ptr, scale_ptr, sums_ptr, Kp, G, BLOCK)


@triton.jit
def silu_mul_kernel(x_ptr, y_ptr, peak_ptr, K, y_stride, chunks, CHUNK: tl.constexpr):
    """y = silu(gate) · up and the bits of its peak, for x fp32 [M, 2K] = [gate | up]; one program
    for CHUNK numbers of a row. y may lie over the gate."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    gate = tl.load(x_ptr + row * 2 * K + i, mask=i < K, other=0.0)
    up = tl.load(x_ptr + row * 2 * K + K + i, mask=i < K, other=0.0)
    y = silu_mul(gate, up)
    tl.store(y_ptr + row * y_stride + i, y, mask=i < K)
    tl.store(peak_ptr + row * chunks + chunk, peak_bits(y))


@triton.jit
def quantise_chunks_kernel(
    y_ptr, peak_ptr, codes_ptr, scale_ptr, sums_ptr, K, Kp, y_stride, chunks,
    G: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Quantise rows whose chunks' peaks are known; one program for CHUNK numbers of a row."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    c = tl.arange(0, CHUNKS)
    most = tl.max(tl.load(peak_ptr + row * chunks + c, mask=c < chunks, other=0), 0)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    y = tl.load(y_ptr + row * y_stride + i, mask=i < K, other=0.0)
    _store_quantised(y, most, i, chunk, row, codes_ptr, scale_ptr, sums_ptr, Kp, G, CHUNK)


def block_of(num_inputs: int, group_size: int) -> int:
    """Return the block a row of this length is read as."""
    block: int = max(triton.next_power_of_2(num_inputs), group_size)
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
    peaks = torch.empty(M, triton.cdiv(F, CHUNK), dtype=torch.int32, device=gate_up.device)
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
    chunks = triton.cdiv(K, CHUNK)
    stride = room.y.stride(0)
    silu_mul_kernel[(M, chunks)](
        gate_up, room.y, room.peaks, K, stride, chunks, CHUNK=CHUNK, num_warps=4, **EXACT
    )
    quantise_chunks_kernel[(M, chunks)](
        room.y, room.peaks, out.codes, out.scale, out.sums, K, padded(K, group_size), stride,
        chunks, G=group_size, CHUNK=CHUNK, CHUNKS=triton.next_power_of_2(chunks), num_warps=4,
        **EXACT,
    )  # fmt: skip
    return out
