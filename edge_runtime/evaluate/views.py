"""The ways one model is run: teacher-forced, or answering; several side by side.

Invariant: views that are compared see the same token ids at the same positions, block of rows by
block of rows, so that logits of whole texts are never held: a block has LOGITS_BYTES at most in
each view. Every view has a cache of its own; views of one checkpoint share its weights.

    fp          the original, unquantised, in fp32 torch
    w8a8        plain W8A8, round to nearest, of the same rotated matrices ("b"); the embedding and
                the KV cache are quantised as in the target; on the reference backend
    nest, w8    the target; where a model answers, nest drafts and w8 goes one token at a time
    w4          the base plane everywhere, over a cache of its own
    w4a16       the base plane with activations and cache unquantised, in fp32 torch
    draft       the base plane as it really runs: one row over the cache that the target wrote

    NAME:POLICY  (kv8, kv4, recent:N) what it reads of the KV cache: nest:kv4 is a target over KV4
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from edge_runtime.cache.policy import KV8, KvPolicy, parse_policy
from edge_runtime.decode.draft import DraftChoice
from edge_runtime.decode.engine import Engine
from edge_runtime.decode.sampling import Sampling
from edge_runtime.errors import UsageError, cut
from edge_runtime.kernels.layout import CHUNK_ROWS
from edge_runtime.kernels.ops import F32, View

if TYPE_CHECKING:
    from edge_runtime.decode.request import Result

ViewName = Literal["fp", "w8a8", "nest", "w8", "w4", "w4a16", "draft"]
NAMES: tuple[ViewName, ...] = ("fp", "w8a8", "nest", "w8", "w4", "w4a16", "draft")
PROGRAMS: dict[str, View] = {"fp": "fp", "w8a8": "w8", "nest": "w8", "w8": "w8", "w4": "w4"}
PROGRAMS |= {"draft": "w4", "w4a16": "fp"}
OPENED_AS = {n: n for n in ("fp", "w8a8", "w4a16")}  # engines of views: else the checkpoint's
LOGITS_BYTES = 32 << 20  # of one view's block of logits


@dataclass(frozen=True, slots=True)
class ViewSpec:
    """A view as it was asked for."""

    name: ViewName
    policy: KvPolicy = KV8

    def __str__(self) -> str:
        """Return the command-line spelling."""
        return self.name if self.policy == KV8 else f"{self.name}:{self.policy}"

    @property
    def opened_as(self) -> str:
        """Which engine it runs on: fp, w8a8, w4a16 or nest."""
        return OPENED_AS.get(self.name, "nest")


def parse_view(text: str) -> ViewSpec:
    """Parse NAME or NAME:POLICY. Raises UsageError."""
    name, colon, policy = text.partition(":")
    if name not in NAMES:
        raise UsageError(
            f"--views: expected some of {','.join(NAMES)}, got {cut(text)!r}",
            "NAME:POLICY says what is read of the KV cache, for example draft:kv4",
        )
    if colon and name in ("fp", "w4a16"):
        raise UsageError(f"--views {cut(text)}: the cache of {name} is not quantised")
    return ViewSpec(name, parse_policy(policy) if colon else KV8)


class RunningView:
    """One view, ready to run."""

    def __init__(self, spec: ViewSpec, engine: Engine) -> None:
        """engine: of this view alone; its weights may be shared."""
        self.spec, self.engine = spec, engine
        self._program = PROGRAMS[spec.name]

    @property
    def block_rows(self) -> int:
        """Rows of a block of logits."""
        return max(1, min(CHUNK_ROWS, LOGITS_BYTES // (4 * self.engine.num_tokens)))

    def blocks(self, ids: Sequence[int], first: int) -> Iterator[F32]:
        """Run ids from position 0; yield the logits of rows first, first + 1, … block by block.

        fp32 [rows, V]. Row i holds the logits after ids[: i + 1].
        """
        self.engine.reuse([0])  # what a generation left in the cache is overwritten
        draft = self.spec.name == "draft"
        view: View = "w8" if draft else self._program
        policy = KV8 if draft else self.spec.policy
        for a in range(0, first, CHUNK_ROWS):
            self._forward(view, ids[a : min(a + CHUNK_ROWS, first)], a, policy)
        for a in range(first, len(ids), self.block_rows):
            part = ids[a : a + self.block_rows]
            logits = self._forward(view, part, a, policy, num_logits=len(part))
            if draft:
                del logits
                yield self._drafted(part, a)
                self._forward("w8", part, a, KV8)  # what drafting overwrote
            else:
                yield logits

    def _drafted(self, part: Sequence[int], start: int) -> F32:
        """Logits of one base row at a time over the cache of the target.

        From the last to the first: a row writes its own position, which earlier rows never read.
        """
        found = np.empty((len(part), self.engine.num_tokens), np.float32)
        for i in reversed(range(len(part))):
            found[i] = self._forward("w4", part[i : i + 1], start + i, self.spec.policy)[0]
        return found

    def _forward(
        self, view: View, ids: Sequence[int], start: int, policy: KvPolicy, num_logits: int = 1
    ) -> F32:
        engine = self.engine
        logits = engine.model.forward(
            view, ids, start, engine.cache, policy=policy, num_logits=num_logits
        )
        return logits.numpy()

    def answer(
        self,
        ids: list[int],
        *,
        new_tokens: int,
        sampling: Sampling,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> Result:
        """Complete a prompt; text continues the prompt's."""
        if self.spec.name == "draft":
            raise UsageError(
                "view draft answers nothing: it is compared with the target",
                "view w4 answers with the base plane alone",
            )
        return self.engine.generate(
            ids,
            max_new_tokens=new_tokens,
            sampling=sampling,
            stop=stop,
            ignore_eos=ignore_eos,
        ).complete()


class Views:
    """The views of a run, opened when they are first asked for; use as a context manager."""

    def __init__(self, open_engine: Callable[[str], Engine]) -> None:
        """open_engine: opens "nest", "fp", "w8a8" or "w4a16"."""
        self._open = open_engine
        self._engines: dict[str, Engine] = {}
        self._running: dict[ViewSpec, RunningView] = {}

    def __enter__(self) -> Views:
        """Return self."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close all engines."""
        for engine in self._engines.values():
            engine.close()

    def engine(self, name: str) -> Engine:
        """Return the engine of nest, fp, w8a8 or w4a16."""
        if name not in self._engines:
            self._engines[name] = self._open(name)
        return self._engines[name]

    def get(self, spec: ViewSpec) -> RunningView:
        """Return a view."""
        if spec not in self._running:
            first = self.engine(spec.opened_as)
            plain = spec.name in ("nest", *OPENED_AS) and spec.policy == KV8
            self._running[spec] = RunningView(spec, first if plain else beside(first, spec))
        return self._running[spec]


def beside(engine: Engine, spec: ViewSpec) -> Engine:
    """Return an engine of another view over the same weights, with a cache of its own."""
    # the passes of a draft name their policies themselves
    policy = KV8 if spec.name == "draft" else spec.policy
    return Engine(
        engine.model.reading(policy),
        engine.tokenizer,
        engine.text,
        view="w4" if spec.name == "w4" else "w8",
        context=engine.context,
        draft=DraftChoice(0, "base", "one token at a time"),
        backend_why=engine.backend_why,
        group_size=engine.group_size,
        watch=engine.watch,
    )
