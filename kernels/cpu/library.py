"""The native library: finding it, its C structs, and which instruction sets run here.

Invariant: the structs mirror `native/program.h` and `native/c_api.cpp` field by field; ctypes lets
go of the interpreter's lock during every call.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_uint64,
    c_void_p,
    sizeof,
)
from functools import cache
from pathlib import Path

from edge_runtime.errors import BackendUnavailable, UsageError

NAME = "libedge_cpu.so"
ISAS = ("avx512_vnni", "avx2", "dotprod", "portable")  # the best first
ISA_VARIABLE = "BITNEST_ISA"
MAX_HEAD_DIM, MAX_HEADS_PER_KV = 512, 32  # kMaxDim, kMaxQuery
REINSTALL = "install bitnest-edge again on this machine"
KINDS = (  # OpKind
    *("embed", "norm_quantise", "quantise", "linear", "rope_kv", "attention", "combine"),
    *("select_rows", "head"),
)
SIZES = (  # of `kernels.ops.Geometry`
    *("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "num_tokens"),
    "rotate_kv",
)


class Geometry(Structure):
    """Sizes of the model."""

    _fields_ = (
        *((name, c_int32) for name in (*SIZES, "group_size")),
        ("softmax_scale", c_float),
    )


class Op(Structure):
    """One op of a program."""

    _fields_ = (
        *(
            (n, c_int32)
            for n in ("kind", "a", "out", "residual", "gate_up", "weight", "layer", "w8")
        ),
        ("eps", c_float),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
    )


class Batch(Structure):
    """One pass."""

    _fields_ = (
        *((n, c_void_p) for n in ("ids", "rows", "positions", "full_from")),
        *((n, c_int32) for n in ("M", "num_logits", "skip")),
        ("logits", c_void_p),
        ("stride", c_int64),
        ("best", c_void_p),
        ("finite", c_void_p),
    )


class LinearArgs(Structure):
    """Repacked planes of one matrix."""

    _fields_ = (
        *((n, c_void_p) for n in ("base", "refine", "mult", "scale", "bias")),
        *((n, c_int32) for n in ("N", "K", "Kp", "G")),
    )


class SampleArgs(Structure):
    """One choice of a token."""

    _fields_ = (
        *((n, c_void_p) for n in ("logits", "prompt", "answer", "allowed")),
        *((n, c_int64) for n in ("prompt_length", "answer_length")),
        *((n, c_int32) for n in ("num_tokens", "num_allowed", "top_k")),
        *(
            (n, c_double)
            for n in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")
        ),
        *((n, c_uint64) for n in ("seed", "position")),
    )


ABI = (
    (  # edge_abi
        ((2 * 1000 + sizeof(Op)) * 1000 + sizeof(Batch)) * 1000 + sizeof(SampleArgs)
    )
    * 1000
    + sizeof(LinearArgs)
    + sizeof(Geometry)
)

SIGNATURES = {
    "edge_abi": (c_int64, ()),
    "edge_isa_available": (c_int32, (c_char_p,)),
    "edge_model_new": (
        c_void_p,
        (POINTER(Geometry), c_char_p, c_int32, c_void_p, c_void_p, c_void_p, c_void_p),
    ),
    "edge_model_free": (None, (c_void_p,)),
    "edge_model_linear": (c_int32, (c_void_p, POINTER(LinearArgs))),
    "edge_repack": (
        None,
        (c_void_p, c_void_p, c_void_p, c_void_p, *(c_int32,) * 3, c_void_p, c_void_p, c_void_p),
    ),
    "edge_read": (c_uint64, (c_void_p, c_void_p, c_int64)),
    "edge_program_new": (c_void_p, (c_void_p, POINTER(Op), c_int32, POINTER(c_int32), c_int32)),
    "edge_program_free": (None, (c_void_p,)),
    "edge_workspace_bytes": (c_int64, (c_void_p,)),
    "edge_release_workspace": (None, (c_void_p,)),
    "edge_run": (None, (c_void_p, POINTER(Batch), c_void_p)),
    "edge_sample": (c_int32, (c_void_p, POINTER(SampleArgs))),
    "edge_cache_new": (c_void_p, (c_void_p, c_int32)),
    "edge_cache_free": (None, (c_void_p,)),
    "edge_cache_trim": (None, (c_void_p, c_int32)),
    "edge_cache_bytes": (c_int64, (c_void_p,)),
    "edge_cache_copy": (
        None,
        (c_void_p, c_void_p, *(c_int32,) * 4, c_void_p, c_void_p, c_void_p),
    ),
}


def library_path() -> Path | None:
    """Return where the library is, or None if it was not built."""
    import edge_runtime.kernels.cpu as package

    # an editable install has the sources in one folder of the package and the library in another
    for folder in package.__path__:
        path = Path(folder) / NAME
        if path.exists():
            return path
    return None


@cache
def load() -> ctypes.CDLL:
    """Load the library. Raises BackendUnavailable."""
    path = library_path()
    if path is None:
        raise BackendUnavailable(
            "the native CPU kernels were not built",
            "install a C++ compiler and bitnest-edge again",
        )
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise BackendUnavailable(f"native CPU kernels: {error}", REINSTALL) from None
    if library.edge_abi() != ABI:
        raise BackendUnavailable(f"{path}: built for another version of bitnest-edge", REINSTALL)
    return library


def limits(head_dim: int, heads_per_kv: int) -> str:
    """Return why a model is too wide for these kernels, or nothing."""
    if head_dim > MAX_HEAD_DIM:
        return (
            f"native kernels take a head_dim of at most {MAX_HEAD_DIM}, this model has {head_dim}"
        )
    if heads_per_kv > MAX_HEADS_PER_KV:
        return (
            f"native kernels take at most {MAX_HEADS_PER_KV} query heads for a KV head, this model "
            f"has {heads_per_kv}"
        )
    return ""


def available_isas() -> list[str]:
    """Return the instruction sets that run here, the best first."""
    library = load()
    return [name for name in ISAS if library.edge_isa_available(name.encode())]


def choose_isa() -> str:
    """Return the best one, or what the environment asks for. Raises UsageError."""
    found = available_isas()
    wanted = os.environ.get(ISA_VARIABLE)
    if not wanted:
        return found[0]
    if wanted not in found:
        raise UsageError(
            f"{ISA_VARIABLE}: expected one of {', '.join(found)} on this machine, got {wanted!r}"
        )
    return wanted
