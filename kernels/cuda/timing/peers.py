"""Products of other libraries beside ours: the same shape and rows, the numbers each is made for.

    fp16     cuBLAS through torch: 16-bit weights and activations
    int4     torch's own 4-bit product (`_weight_int4pack_mm`): bfloat16 activations, groups
    gemlite  4-bit weights, fp16 activations, groups; where the package is installed

Only its time is taken: what a peer computes is not compared with ours.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from edge_runtime.kernels.cuda.timing.entry import Entry, num_copies

INNER_TILES = 8  # of 16 inputs, as torch's int4 product packs them
INT4_GROUPS = (32, 64, 128, 256)


def versions() -> dict[str, str]:
    """Return what each peer is, by the name its figures go under; why it is not there otherwise."""
    found = {"fp16": f"cuBLAS, torch {torch.__version__}"}
    has_int4 = hasattr(torch.ops.aten, "_weight_int4pack_mm")
    found["int4"] = (
        f"_weight_int4pack_mm, torch {torch.__version__}" if has_int4 else "not in this torch"
    )
    found["gemlite"] = (
        f"gemlite {importlib.metadata.version('gemlite')}" if _has_gemlite() else "not installed"
    )
    found["torch"] = f"attention in fp16, torch {torch.__version__}"
    return found


def _has_gemlite() -> bool:
    return importlib.util.find_spec("gemlite") is not None


class Peers:
    """Matrices of one shape for every peer that takes it."""

    def __init__(self, N: int, K: int, group: int, device: str = "cuda") -> None:
        self._shape, self._group = (N, K), group
        self._copies = num_copies(N * K // 2, device)
        self._half = halves(N, K, num_copies(2 * N * K, device), device)
        on_gpu = device != "cpu"
        self._int4 = _int4(N, K, group, self._copies) if on_gpu else []
        self._gemlite = _gemlite(N, K, group, self._copies) if on_gpu else []

    def entries(self, name: str, M: int) -> Iterator[Entry]:
        """What is timed for M rows."""
        N, K = self._shape
        yield cublas(name, self._half, M)
        if self._int4:
            x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
            call = _int4_call(x, self._int4, self._group)
            size = N * K // 2 + 4 * N * (K // self._group)
            yield Entry(name, M, call, self._copies, size, f"{N}x{K}", "int4", peer=True)
        if self._gemlite:
            x = torch.randn(M, K, device="cuda", dtype=torch.float16)
            call = _gemlite_call(x, self._gemlite)
            size = N * K // 2 + 4 * N * (K // self._group)
            yield Entry(name, M, call, self._copies, size, f"{N}x{K}", "gemlite", peer=True)


def halves(N: int, K: int, copies: int, device: str = "cuda") -> Tensor:
    """Random fp16 matrices [copies, N, K]."""
    w = torch.empty(copies, N, K, device=device, dtype=torch.float16)
    for one in w:
        one.normal_()
    return w


def cublas(name: str, w: Tensor, M: int) -> Entry:
    """One fp16 product with each matrix of w [n, N, K]."""
    n, N, K = w.shape
    x = torch.randn(M, K, device=w.device, dtype=torch.float16)
    y = torch.empty(M, N, device=w.device, dtype=torch.float16)
    return Entry(name, M, _half_call(x, w, y), n, 2 * N * K, f"{N}x{K}", "fp16", peer=True)


def _half_call(x: Tensor, w: Tensor, y: Tensor) -> Callable[[int], object]:
    return lambda i: torch.mm(x, w[i].t(), out=y)


def _int4(N: int, K: int, group: int, copies: int) -> list[tuple[Tensor, Tensor]]:
    """Packed nibbles and, for each group, a scale and a zero; none where the shape does not fit."""
    if N % 8 or K % (16 * INNER_TILES) or group not in INT4_GROUPS:
        return []
    found = []
    for _ in range(copies):
        nibbles = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, device="cuda")
        packed = torch.ops.aten._convert_weight_to_int4pack(nibbles, INNER_TILES)
        scales = torch.rand(K // group, N, 2, device="cuda", dtype=torch.bfloat16)
        found.append((packed, scales))
    return found


def _int4_call(x: Tensor, ws: list[tuple[Tensor, Tensor]], group: int) -> Callable[[int], object]:
    def call(i: int) -> object:
        packed, scales = ws[i]
        return torch.ops.aten._weight_int4pack_mm(x, packed, group, scales)

    return call


def _gemlite(N: int, K: int, group: int, copies: int) -> list[Any]:
    if not _has_gemlite():
        return []
    core: Any = importlib.import_module("gemlite.core")

    found = []
    for _ in range(copies):
        one = core.GemLiteLinear(
            W_nbits=4, group_size=group, in_features=K, out_features=N,
            input_dtype=core.DType.FP16, output_dtype=core.DType.FP16,
        )  # fmt: skip
        half: dict[str, Any] = {"device": "cuda", "dtype": torch.float16}
        codes = torch.randint(0, 16, (N, K), dtype=torch.uint8, device="cuda")
        scales, zeros = (torch.rand(N * K // group, 1, **half) for _ in range(2))
        one.pack(codes, scales, zeros, None)
        found.append(one)
    return found


def _gemlite_call(x: Tensor, ws: list[Any]) -> Callable[[int], object]:
    return lambda i: ws[i].forward(x)
