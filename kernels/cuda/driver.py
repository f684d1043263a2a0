"""Run saved kernels through the CUDA driver API: no Triton, no compiler, no torch.

    function = load(Compiled.read(folder, "linear-w8"))
    function.launch(grid, [pointer, ..., number, ...], stream)

The module is loaded into the current CUDA context of the thread (torch's, once it has touched the
GPU). A cubin runs on its own chip family only; PTX on that one and every newer one.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from edge_runtime.errors import BackendUnavailable
from edge_runtime.kernels.cuda.compile import Compiled

_OPTIN_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_DEFAULT_SHARED = 48 * 1024
_C_TYPES: dict[str, Any] = {
    "u64": ctypes.c_uint64,
    "b64": ctypes.c_uint64,
    "s64": ctypes.c_int64,
    "u32": ctypes.c_uint32,
    "b32": ctypes.c_uint32,
    "s32": ctypes.c_int32,
    "f32": ctypes.c_float,
}


class Function:
    """A kernel in the current context."""

    def __init__(self, handle: ctypes.c_void_p, compiled: Compiled) -> None:
        self._handle = handle
        self._types = [_C_TYPES[name] for name in compiled.parameters]
        self._threads = 32 * compiled.num_warps
        self._shared = compiled.shared_bytes

    def attribute(self, which: int) -> int:
        """A CUfunction_attribute: 4 is registers a thread, 3 bytes of local memory a thread."""
        value = ctypes.c_int()
        call("cuFuncGetAttribute", ctypes.byref(value), which, self._handle)
        return value.value

    def launch(
        self, grid: tuple[int, ...], arguments: Sequence[int | float], stream: int = 0
    ) -> None:
        """Enqueue. arguments: device addresses and numbers; missing ones at the end are zero."""
        padding = [0] * (len(self._types) - len(arguments))
        values = [
            kind(value) for kind, value in zip(self._types, [*arguments, *padding], strict=True)
        ]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        blocks = (*grid, 1, 1)[:3]
        call(
            "cuLaunchKernel",
            self._handle,
            *blocks,
            self._threads,
            1,
            1,
            self._shared,
            ctypes.c_void_p(stream),
            pointers,
            None,
        )


def load(compiled: Compiled, *, ptx: bool = False) -> Function:
    """Load the cubin, or the PTX, which the driver then compiles for the GPU it finds."""
    image = compiled.ptx.encode() + b"\0" if ptx else compiled.cubin
    module = ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(image))
    handle = ctypes.c_void_p()
    call("cuModuleGetFunction", ctypes.byref(handle), module, compiled.name.encode())
    if compiled.shared_bytes > _DEFAULT_SHARED:
        call("cuFuncSetAttribute", handle, _OPTIN_SHARED, compiled.shared_bytes)
    return Function(handle, compiled)


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BackendUnavailable(f"the CUDA driver cannot be loaded: {error}") from error


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver. Raises BackendUnavailable with its own words."""
    library = _library()
    status = getattr(library, name)(*arguments)
    if status != 0:
        text = ctypes.c_char_p()
        library.cuGetErrorString(status, ctypes.byref(text))
        reason = (text.value or b"unknown error").decode()
        raise BackendUnavailable(f"{name}: {reason} (CUDA error {status})")
