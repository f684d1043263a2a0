"""A model that can be run: programs per view over one backend, prompts in chunks.

Invariant: a forward pass has no state besides the cache it is given; the same rows at the same
positions over the same cache give the same bits, however they are chunked.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_runtime.cache.policy import KV8, KvPolicy
from edge_runtime.format.spec import ModelSpec
from edge_runtime.kernels.ops import Backend, Batch, Cache, Logits, Program, View
from edge_runtime.model.load import rotate_rows
from edge_runtime.model.transformer import model_program


class Model:
    """Forward passes of one model on one backend."""

    def __init__(
        self,
        spec: ModelSpec,
        backend: Backend,
        *,
        r1: npt.NDArray[Any] | None = None,
        r1_scale: float = 1.0,
        quantised: bool = True,
    ) -> None:
        """r1: [H, H], multiplied by r1_scale, maps caller-given embedding rows into the basis."""
        self.spec = spec
        self.backend = backend
        self._r1, self._r1_scale = r1, r1_scale
        self._quantised = quantised
        self._programs: dict[tuple[View, bool], Program] = {}
        self.policy = KV8  # what rows read of the cache, where a pass does not say

    def reading(self, policy: KvPolicy) -> Model:
        """Return this model over the same weights, whose rows read the cache by a policy: a target
        over KV4, which evaluations compare."""
        other = copy.copy(self)
        other.policy = policy
        return other

    def program(self, view: View, *, logits: bool = True) -> Program:
        """Return the program of a view, emitted once."""
        key = (view, logits)
        if key not in self._programs:
            self._programs[key] = model_program(self.spec, view, logits=logits)
        return self._programs[key]

    def forward(
        self,
        view: View,
        ids: Sequence[int],
        start: int,
        cache: Cache,
        *,
        policy: KvPolicy | None = None,
        num_logits: int = 1,
    ) -> Logits:
        """Run `ids` at positions start, start + 1, … and return logits of the last rows."""
        positions = np.arange(start, start + len(ids), dtype=np.int64)
        batch = Batch(
            ids=np.asarray(ids, dtype=np.int64),
            positions=positions,
            full_from=(policy or self.policy).full_from(positions),
            num_logits=num_logits,
        )
        logits = self.backend.run(self.program(view), batch, cache)
        assert logits is not None
        return logits

    def prefill(
        self,
        view: View,
        part: Sequence[int] | npt.NDArray[np.float32],
        start: int,
        cache: Cache,
        *,
        chunk: int | None = None,
        want_logits: bool,
        proceed: Callable[[int], bool] = lambda done: True,
    ) -> tuple[int, Logits | None]:
        """Fill the cache with one span of a prompt, ids or embedding rows [n, H]. chunk: rows that
        pass together; None: as many as the backend takes.

        Calls `proceed(rows done)` between chunks and stops early if it returns False. Returns the
        rows done and, if wanted and everything was run, the logits of the last row.
        """
        rows = None if isinstance(part, Sequence) else self.embedding_rows(part)
        ids = None if rows is not None else np.asarray(part, dtype=np.int64)
        total, done = len(part), 0
        logits: Logits | None = None
        while done < total:
            n = min(chunk or self.backend.chunk_rows, total - done)
            positions = np.arange(start + done, start + done + n, dtype=np.int64)
            last = want_logits and done + n == total
            batch = Batch(
                ids=None if ids is None else ids[done : done + n],
                rows=None if rows is None else rows[done : done + n],
                positions=positions,
                full_from=self.policy.full_from(positions),
            )
            logits = self.backend.run(self.program(view, logits=last), batch, cache)
            done += n
            if done < total and not proceed(done):
                return done, None
        return done, logits if want_logits else None

    def embedding_rows(self, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Bring rows of the original model's basis [n, H] into this model's, as its table does."""
        if not self._quantised:
            if self._r1 is not None:
                rows = (rows @ self._r1.astype(np.float64)) * self._r1_scale
            return np.ascontiguousarray(rows, dtype=np.float32)
        codes, scale = rotate_rows(rows, self._r1, self._r1_scale)
        return codes.astype(np.float32) * scale[:, None]
