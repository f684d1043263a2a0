"""Logits of the native backend: a buffer that passes share, and what is chosen from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edge_runtime.kernels import ops
from edge_runtime.kernels.cpu import library
from edge_runtime.kernels.sampling import Parameters

if TYPE_CHECKING:
    from edge_runtime.kernels.cpu.backend import CpuBackend

SAMPLING_FIELDS = (
    *("temperature", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "seed"),
)


class LogitsBuffer:
    """Where a pass leaves its logits: fp32 [rows, width], the best id per row, whether all are
    finite. Addresses are asked for once: numpy takes a microsecond for each."""

    def __init__(self, rows: int, width: int) -> None:
        self.rows = rows
        self.values = np.empty((rows, width), np.float32)
        self.best = np.empty(rows, np.int32)
        self.finite = np.ones(1, np.int32)
        self.addresses = tuple(a.ctypes.data for a in (self.values, self.best, self.finite))


class CpuLogits:
    """fp32 [rows, V]; the best id per row was found while they were made."""

    def __init__(self, owner: CpuBackend, buffer: LogitsBuffer, rows: int) -> None:
        self._owner, self._buffer, self._num = owner, buffer, rows

    def __del__(self) -> None:
        """Give the buffer back for the next pass."""
        self._owner.spare = self._buffer

    def wait(self) -> None:
        """Do nothing: `run` waits."""

    @property
    def _rows(self) -> npt.NDArray[np.float32]:
        return self._buffer.values[: self._num, : self._owner.geometry.num_tokens]

    def _check(self) -> None:
        if not self._buffer.finite[0]:
            raise ops.not_finite()

    def argmax(self, allowed: Sequence[int] | ops.I64 | None = None) -> list[int]:
        """Return the lowest winning id per row."""
        self._check()
        if allowed is None:
            best: list[int] = self._buffer.best[: self._num].tolist()
            return best
        ids = np.unique(np.asarray(allowed, dtype=np.int64))
        return [int(ids[i]) for i in self._rows[:, ids].argmax(-1)]

    def sample(
        self,
        row: int,
        position: int,
        prompt: Sequence[int],
        answer: Sequence[int],
        parameters: Parameters,
        allowed: ops.I64 | None = None,
    ) -> int:
        """Choose a token from one row."""
        self._check()
        p = parameters
        # a long prompt is not copied for a penalty that is off
        seen = np.array(prompt if p.repetition_penalty != 1 else (), np.int64)
        own = np.array(answer, np.int64)
        ids = None if allowed is None else np.ascontiguousarray(allowed, np.int32)
        args = library.SampleArgs(
            logits=self._rows[row].ctypes.data,
            prompt=seen.ctypes.data,
            answer=own.ctypes.data,
            allowed=None if ids is None else ids.ctypes.data,
            prompt_length=len(seen),
            answer_length=len(own),
            num_tokens=self._rows.shape[1],
            num_allowed=0 if ids is None else len(ids),
            position=position,
        )
        for name in SAMPLING_FIELDS:
            setattr(args, name, getattr(p, name))
        args.top_k = min(p.top_k, args.num_tokens)
        return int(self._owner.lib.edge_sample(self._owner.model, args))

    def numpy(self) -> ops.F32:
        """Return a copy of the logits."""
        self._check()
        return np.array(self._rows)
