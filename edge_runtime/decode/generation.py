"""One generation: prefill, then cycles of draft, verify, accept, commit (BitNest 3.1; DESIGN 6).

Invariant: emitted tokens are those of the target decoding one at a time. A cycle feeds the last
token t0 and the draft d1…dγ at their positions with the target view, which overwrites whatever the
draft wrote there; row i chooses the token after d_i, and rows are taken while they agree with the
draft, plus the first that does not (the bonus). The cache is valid up to, not including, the last
emitted token.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING

from edge_runtime.decode.constraint import Constraint, Ids
from edge_runtime.decode.cycles import DeviceCycles
from edge_runtime.decode.draft import (
    BaseDraft,
    BothDraft,
    DraftChoice,
    DraftSource,
    NgramDraft,
)
from edge_runtime.decode.governor import GovernedDraft
from edge_runtime.decode.logprobs import LogProbs, log_probs
from edge_runtime.decode.request import DraftStats, FinishReason, Prompt, Result, Token
from edge_runtime.decode.sampling import Sampling
from edge_runtime.errors import UsageError
from edge_runtime.kernels.layout import MAX_GAMMA
from edge_runtime.kernels.ops import Logits
from edge_runtime.text.stream import Piece

if TYPE_CHECKING:
    from edge_runtime.decode.engine import Engine

PROMPT_CHUNK = 32  # rows between two looks at the clock, where there is a deadline


class Generation:
    """An iterator of tokens; afterwards (or after a break) `result` holds the figures."""

    def __init__(
        self,
        engine: Engine,
        prompt: Prompt,
        *,
        max_new_tokens: int,
        sampling: Sampling,
        stop: Sequence[str],
        ignore_eos: bool,
        constraint: Constraint | None,
        logprobs: int | None,
        deadline_s: float | None,
        draft_source: DraftSource | None,
        continues: bool,
    ) -> None:
        """Made by `Engine.generate`, which checks the arguments."""
        self._engine, self._prompt, self._sampling = engine, prompt, sampling
        self._max_new = max_new_tokens
        self._ignore_eos = ignore_eos
        self._constraint, self._num_top = constraint, logprobs
        self._logprobs: deque[LogProbs] = deque()  # of tokens chosen and not emitted
        self._started = time.perf_counter()
        self._deadline = None if deadline_s is None else self._started + deadline_s
        self._cancelled = threading.Event()
        self._answer: list[int] = []
        self._forced = engine.forced
        self._stats = DraftStats()
        self._stream = engine.new_stream(stop, continues=continues)
        self._given_source = draft_source is not None
        self._source = draft_source or self._own_source(engine.draft)
        self._gamma = (
            engine.draft.gamma if draft_source is None else engine.draft.gamma or MAX_GAMMA
        )
        self.result = Result(
            prompt_tokens=len(prompt),
            backend=engine.backend_name,
            backend_why=engine.backend_why,
            view=engine.view,
            kv_policy=str(engine.policy),
            context_max=engine.context,
            draft_why=engine.draft.why,
            seed=sampling.seed,
            synthetic=engine.synthetic,
            forced=bool(engine.forced),
        )
        self._device: DeviceCycles | None = None
        self._tokens = self._run()

    def __iter__(self) -> Iterator[Token]:
        """Yield tokens as they are verified."""
        return self

    def __next__(self) -> Token:
        """Return the next token."""
        return next(self._tokens)

    def cancel(self) -> None:
        """Stop within one cycle; may be called from another thread or a signal handler."""
        self._cancelled.set()

    def close(self) -> None:
        """End it now; what was emitted stays."""
        if inspect.getgeneratorstate(self._tokens) == inspect.GEN_CREATED:
            self._finish("cancelled")  # closing a generator that never ran does not run its end,
            self._tokens = _over()  # and from Python 3.12 on does not free it
        try:
            self._tokens.close()
        except ValueError:  # it is running, in another thread
            raise UsageError(
                "the engine is busy: another thread runs a generation",
                "cancel() that one and let it end, or use one engine a thread",
            ) from None

    def complete(self) -> Result:
        """Run to the end and return the result."""
        for _ in self:
            pass
        return self.result

    # how a token is chosen

    def _pick(self, logits: Logits, position: int, drafted: list[int]) -> int:
        """Choose from one row of logits."""
        if self._sampling.plain_greedy:
            return logits.argmax(self._allowed(drafted))[0]
        return self._sample(logits, 0, position, drafted)

    def _sample(self, logits: Logits, row: int, position: int, drafted: list[int]) -> int:
        answer, allowed = [*self._answer, *drafted], self._allowed(drafted)
        return logits.sample(row, position, self._prompt.ids, answer, self._sampling, allowed)

    def _allowed(self, drafted: list[int]) -> Ids | None:
        """Return the ids that may follow the answer and what is drafted; None: all."""
        if self._constraint is None:
            return None
        return self._constraint.allowed([*self._answer, *drafted])

    def _own_source(self, choice: DraftChoice) -> DraftSource | None:
        if choice.gamma == 0:
            return None
        engine = self._engine
        ngram = NgramDraft()
        base = BaseDraft(
            engine.model,
            engine.cache,
            engine.policy,
            self._pick,
            self._drafted,
        )
        if choice.governed:
            return GovernedDraft(engine.governor, base, ngram)
        if choice.source == "ngram":
            return ngram
        return base if choice.source == "base" else BothDraft(base, ngram)

    def _drafted(self, seconds: float) -> None:
        """Note one draft step that has just ended."""
        self._engine.governor.times.add("w4", 1, seconds)
        self._engine.note("draft", time.perf_counter() - seconds)

    # the run

    def _run(self) -> Generator[Token, None, None]:
        reason: FinishReason = "cancelled"
        try:
            logits = self._prefill()
            if logits is None:
                reason = self._why_stopped() or "cancelled"
                return
            first = self._pick(logits, len(self._prompt), [])
            self._note_logprobs(logits, [first])
            self.result.ttft_s = time.perf_counter() - self._started
            del logits  # their room is the cycles'
            self._device = self._device_cycles(first)
            pending = [first]
            while True:
                for token in pending:
                    self._answer.append(token)
                    ended = self._ended(token)
                    text, stopped = self._emit(token, ended)
                    if stopped:
                        ended = "stop"
                    if ended:
                        reason = ended
                    yield Token(token, text, self._logprobs.popleft() if self._logprobs else None)
                    if ended:
                        return
                if why := self._why_stopped():
                    reason = why
                    return
                cycle_started = time.perf_counter()
                pending = self._cycle()
                self.result.decode_s += time.perf_counter() - cycle_started
        finally:
            self._finish(reason)

    def _prefill(self) -> Logits | None:
        """Fill the cache with what of the prompt is not in it; None if stopped on the way."""
        engine, prompt = self._engine, self._prompt
        reused = engine.reuse(prompt.keys)
        self.result.cached_tokens = reused
        started = time.perf_counter()
        logits: Logits | None = None
        for at, part in prompt.parts(reused):
            done, logits = engine.model.prefill(
                engine.target_view,
                part,
                at,
                engine.cache,
                chunk=engine.chunk if self._deadline is None else min(engine.chunk, PROMPT_CHUNK),
                want_logits=at + len(part) == len(prompt),
                proceed=lambda rows, at=at: self._why_stopped(at + rows) is None,  # type: ignore[misc]
            )
            engine.filled(prompt.keys[at : at + done])
            if done < len(part) or (logits is None and self._why_stopped()):
                return None
        if logits is not None:
            logits.wait()
        seconds = time.perf_counter() - started
        engine.note("prefill", started)
        self.result.prefill_tok_s = (len(prompt) - reused) / seconds
        return logits

    def _cycle(self) -> list[int]:
        """Draft, verify, accept, commit; return the tokens that follow the last one."""
        if self._device is not None:
            return self._device_cycle(self._device)
        engine, prompt = self._engine, self._prompt
        start = len(prompt) + len(self._answer) - 1  # position of the last token
        left = self._max_new - len(self._answer)
        gamma = self._in_time(min(self._gamma, left - 1, engine.context - 1 - start))
        draft: list[int] = []
        if self._source is not None and gamma > 0:
            tokens = prompt.ids + self._answer
            for token in self._source.propose(tokens, start, gamma)[:gamma]:
                if not 0 <= token < engine.num_tokens:
                    break  # a caller's own source may guess anything
                draft.append(token)
        rows = [self._answer[-1], *draft]
        started = time.perf_counter()
        logits = engine.model.forward(
            engine.target_view, rows, start, engine.cache, num_logits=len(rows)
        )
        chosen = self._accept(logits, start, draft)
        self._note_logprobs(logits, chosen)
        engine.governor.times.add("w8", len(rows), time.perf_counter() - started)
        engine.note("verify", started)
        if isinstance(self._source, GovernedDraft):
            self._source.judged(len(chosen) - 1)
            self.result.draft_why = engine.governor.why or engine.draft.why
        engine.filled(rows[: len(chosen)])
        self._stats.cycles += 1
        self._stats.drafted += len(draft)
        self._stats.accepted += len(chosen) - 1
        return chosen

    def _device_cycles(self, first: int) -> DeviceCycles | None:
        """Return cycles that the backend runs by itself; None where they cannot make this answer:
        its own draft source, a constraint, penalties or log-probabilities."""
        sampling, engine = self._sampling, self._engine
        plain = sampling.repetition_penalty == 1 and sampling.presence_penalty == 0
        needs_host = self._given_source or self._constraint is not None or self._num_top is not None
        if needs_host or not plain:
            return None
        if (cycles := engine.device_cycles()) is None:
            return None
        cycles.begin([*self._prompt.ids, first], sampling, self._forced)
        return DeviceCycles(
            cycles, engine.draft, engine.governor, known=len(self._prompt) + 1,
            context=engine.context, draft_share=engine.draft_share,
        )  # fmt: skip

    def _device_cycle(self, device: DeviceCycles) -> list[int]:
        engine, started = self._engine, time.perf_counter()
        most = self._in_time(engine.draft.gamma)
        chosen, drafted = device.next(self._max_new - len(self._answer), most)
        ended = time.perf_counter()
        begun = started + (ended - started) * device.draft_part  # of the target's pass, about
        if device.draft_part:
            engine.note("draft", started, begun)
        engine.note("verify", begun, ended)
        engine.filled([self._answer[-1], *chosen[:-1]])
        if engine.draft.governed:
            self.result.draft_why = engine.governor.why or engine.draft.why
        self._stats.cycles += 1
        self._stats.drafted += drafted
        self._stats.accepted += len(chosen) - 1
        return chosen

    def _in_time(self, gamma: int) -> int:
        """Cut a draft so that its cycle, as cycles went so far, ends before the deadline."""
        times = self._engine.governor.times
        if self._deadline is None or not times.measured:
            return gamma
        left = self._deadline - time.perf_counter()
        while gamma > 0 and gamma * times.draft() + times.verify(gamma + 1) > left:
            gamma -= 1
        return gamma

    def _accept(self, logits: Logits, start: int, draft: list[int]) -> list[int]:
        """Return the target's tokens: the agreeing prefix of the draft and one more.

        Where acceptance is forced, as much of the draft as declared, and the target's token after
        that; the time is that of a cycle that accepts so many.
        """
        greedy = None
        if self._sampling.plain_greedy and self._constraint is None:
            greedy = logits.argmax()
        most, forced = len(draft), self._forced
        if forced:
            most = min(forced[self._stats.cycles % len(forced)], most)
        chosen: list[int] = []
        for i in range(most + 1):
            if greedy is not None:
                token = greedy[i]
            elif self._sampling.plain_greedy:
                token = logits.argmax(self._allowed(chosen))[i]
            else:
                token = self._sample(logits, i, start + i + 1, chosen)
            if forced and i < most:
                token = draft[i]
            chosen.append(token)
            if i == most or token != draft[i]:
                break
        return chosen

    def _note_logprobs(self, logits: Logits, chosen: list[int]) -> None:
        if self._num_top is not None:
            rows = logits.numpy()
            count = self._num_top
            self._logprobs.extend(log_probs(rows[i], t, count) for i, t in enumerate(chosen))

    # ends

    def _ended(self, token: int) -> FinishReason | None:
        if token in self._engine.eos_ids and not self._ignore_eos:
            return "eos"
        if len(self._answer) >= self._max_new:
            return "length"
        return None

    def _emit(self, token: int, ended: FinishReason | None) -> tuple[str, bool]:
        """Return the text that may be shown now and whether a stop string was met."""
        piece = Piece("") if ended == "eos" else self._stream.push(token)
        text, stop = piece.text, piece.stop
        if ended and stop is None:
            last = self._stream.flush()
            text, stop = text + last.text, last.stop
        self.result.text += text
        return text, stop is not None

    def _why_stopped(self, computed: int | None = None) -> FinishReason | None:
        """Between passes; computed: tokens in the cache that the engine does not know of yet."""
        if self._engine.watch.due():  # what runs is finished, with less
            self._engine.relieve(computed)
        if self._cancelled.is_set():
            return "cancelled"
        if self._deadline is not None and time.perf_counter() >= self._deadline:
            return "deadline"
        return None

    def _finish(self, reason: FinishReason) -> None:
        r, engine = self.result, self._engine
        r.finish_reason = reason
        r.late = reason == "deadline"
        r.token_ids = list(self._answer)
        if reason == "eos":
            r.token_ids.pop()
        r.new_tokens = len(r.token_ids)
        if reason in ("cancelled", "deadline"):
            r.text += self._stream.flush().text
        self._stats.emitted = max(0, len(self._answer) - 1)
        r.decode_tok_s = self._stats.emitted / r.decode_s if r.decode_s else 0.0
        r.draft = self._stats.as_dict()
        r.memory = engine.memory()
        if self._forced:
            engine.reuse([])  # no text that another one may go on from
        # a source holds methods of this object: neither would be freed before a collection, which
        # does not see what a constraint's library holds
        self._source = self._constraint = self._device = None
        engine.ended(self)


def _over() -> Generator[Token, None, None]:
    """Return a generator that has ended."""
    none: tuple[Token, ...] = ()
    tokens = (token for token in none)
    next(tokens, None)
    return tokens
