"""Memory for repacked weights."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from edge_runtime.kernels.layout import padded

LINE, HUGE_PAGE, ARENA_BLOCK = 64, 2 << 20, 64 << 20


class Arena:
    """Memory on huge pages, given out piece by piece from blocks that grow with the need."""

    def __init__(self) -> None:
        self._blocks: list[npt.NDArray[np.uint8]] = []
        self._used = 0

    def take(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Return the next piece, on a line of the cache."""
        if not self._blocks or self._used + size_bytes > len(self._blocks[-1]):
            # pages that nobody touches take no memory
            size = padded(max(size_bytes, ARENA_BLOCK), HUGE_PAGE) + HUGE_PAGE
            # private: shared memory gets no huge pages
            block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            block.madvise(mmap.MADV_HUGEPAGE)
            whole = np.frombuffer(block, np.uint8)
            self._blocks.append(whole[-whole.ctypes.data % HUGE_PAGE :])
            self._used = 0
        start = self._used
        self._used = start + padded(size_bytes, LINE)
        return self._blocks[-1][start : start + size_bytes]
