"""CUDA graphs by kind: the first of a kind is launched, the second captured, and it is replayed.

Invariant: a graph writes where its launches wrote when it was captured. When the registers that
they wrote to are gone, so are the graphs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator

import torch

from edge_runtime.kernels.cuda import sizes


class Graphs:
    """The graphs that were replayed last, `sizes.MOST_GRAPHS` at most."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, torch.cuda.CUDAGraph | None] = OrderedDict()  # None: seen
        self._writes_to: object = None

    def __len__(self) -> int:
        """Kinds that were seen."""
        return len(self._kept)

    def clear(self) -> None:
        """Free them, and forget what they write to."""
        self._kept.clear()
        self._writes_to = None

    def captured(self, kind: Hashable, writes_to: object) -> torch.cuda.CUDAGraph | None:
        """Return the graph of a kind, if it has one. writes_to: as in `run`."""
        return self._kept.get(kind) if self._writes_to is writes_to else None

    def run(self, kind: Hashable, launch: Callable[[], None], writes_to: object) -> None:
        """Do what `launch` does. writes_to: what the launches of all kinds write to."""
        if self._writes_to is not writes_to:
            self.clear()
            self._writes_to = writes_to
        if kind not in self._kept:  # it compiles and loads its kernels
            self._kept[kind] = None
            launch()
            return
        graph = self._kept[kind] or captured(launch)
        self._kept[kind] = graph
        self._kept.move_to_end(kind)
        if len(self._kept) > sizes.MOST_GRAPHS:
            self._kept.popitem(last=False)
        graph.replay()


def captured(launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture launches; nothing runs."""
    graph = torch.cuda.CUDAGraph()
    with _no_collection(), torch.cuda.stream(capture_stream()):
        graph.capture_begin(capture_error_mode="relaxed")
        try:
            launch()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the stream has to leave its capture
                graph.capture_end()
            raise
        graph.capture_end()
    return graph


def capture_stream() -> torch.cuda.Stream:
    """The stream of captures: the current one, or, as the default stream cannot be captured, one
    for all. cuBLAS keeps room of its own for each that it meets."""
    current = torch.cuda.current_stream()
    return current if current.cuda_stream else _own_stream()


@functools.cache
def _own_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python from collecting garbage: an old graph among it, freed by a thread that captures,
    would spoil the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
