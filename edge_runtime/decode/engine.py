"""The engine: one model, one KV cache, one generation at a time.

Invariant: memory is allocated when it is opened, within the budget, and a request beyond the
context is refused with the numbers before anything runs. The cache always holds a known prefix
(`_keys`), so a prompt that begins with it is not computed again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import psutil

from edge_runtime import kernels
from edge_runtime.cache.policy import KV8, KvPolicy, parse_policy
from edge_runtime.decode import arguments
from edge_runtime.decode.constraint import AllowedIds, Constraint
from edge_runtime.decode.draft import DraftChoice, DraftSource, choose_draft
from edge_runtime.decode.generation import Generation
from edge_runtime.decode.governor import Governor, StepTimes
from edge_runtime.decode.load import load_model, load_tokenizer
from edge_runtime.decode.logprobs import MOST_ALTERNATIVES
from edge_runtime.decode.memory import fit_context, peak_rss_bytes
from edge_runtime.decode.prefix import Prefix, common
from edge_runtime.decode.pressure import MemoryWatch
from edge_runtime.decode.request import Key, Prompt, Span
from edge_runtime.decode.sampling import Sampling
from edge_runtime.errors import ContextError, UsageError
from edge_runtime.format.reader import Checkpoint
from edge_runtime.format.spec import TextSpec
from edge_runtime.kernels.ops import Cycles, RunsCycles, View
from edge_runtime.model.runner import Model
from edge_runtime.plan.footprint import Layout
from edge_runtime.text.stream import TextStream
from edge_runtime.text.template import ChatTemplate
from edge_runtime.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

PhaseName = Literal["prefill", "draft", "verify"]
Phase = tuple[PhaseName, float, float]  # begin and end in seconds, as time.perf_counter counts
Views = Literal["nest", "w8", "w4", "fp"]
Messages = Sequence[Mapping[str, Any]]
DRAFT_SHARE = {"reference": 1.0}  # of a target step's time that a draft takes, until measured
USUAL_SHARE = 0.55
PromptLike = str | Messages | Sequence[int] | Sequence[Span]


class Engine:
    """Open with `Engine.open`; use as a context manager."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        text: TextSpec,
        *,
        view: Views,
        context: int,
        draft: DraftChoice,
        policy: KvPolicy = KV8,
        synthetic: bool = False,
        backend_why: str = "",
        group_size: int = 0,
        layout: Layout = "nest",
        watch: MemoryWatch | None = None,
        model_sha256: str = "",
    ) -> None:
        """Allocate the cache. `Engine.open` and `cli` call this; most users want `open`.

        synthetic: the weights are random, and every result says so. model_sha256: of the manifest.
        """
        self.watch = watch or MemoryWatch()
        self.model, self.tokenizer, self.text = model, tokenizer, text
        self.view, self.context, self.draft, self.policy = view, context, draft, policy
        self.backend_name, self.backend_why = model.backend.name, backend_why
        self.chunk = model.backend.chunk_rows
        self.group_size, self.layout = group_size, layout
        self.draft_share = DRAFT_SHARE.get(self.backend_name, USUAL_SHARE)
        self.governor = Governor(
            StepTimes(self.draft_share),
            use_base=draft.source != "ngram",
            use_ngram=draft.source != "base",
        )
        self.eos_ids = frozenset(text.eos_ids)
        self.target_view: View = "w8" if view == "nest" else view
        self.cache = model.backend.new_cache(context)
        self.template = ChatTemplate(
            text.chat_template, bos_token=text.bos_token, eos_token=text.eos_token
        )
        self._cycles: dict[tuple[View, int | None], Cycles] = {}
        self.synthetic = synthetic
        self.forced: tuple[int, ...] = ()  # for timing alone: drafted tokens to accept, in turns
        self.phases: list[Phase] | None = None  # a list: noted there as they end
        self._keys: list[Key] = []
        self.model_sha256 = model_sha256
        self.prefix: Prefix | None = None  # what prompts begin with, kept in a file
        self._closed = False
        model.backend.prepare(model.program(self.target_view))
        if draft.gamma and draft.source != "ngram":
            model.backend.prepare(model.program("w4"))
        self._running: Generation | None = None

    @classmethod
    def open(
        cls,
        path: str | Path | Checkpoint,
        *,
        backend: str = "auto",
        view: str = "nest",
        draft: str | int = "auto",
        draft_source: str = "auto",
        kv_policy: str = "auto",
        ctx: str | int = "auto",
        budget_bytes: int | None = None,
        reserve_bytes: int = 0,
        threads: int | None = None,
        layout: str = "nest",
        kernels_folder: str | Path | None = None,
    ) -> Engine:
        """Open a converted model, by its folder or already opened.

        view: nest (draft with W4, verify with W8), w8 (the target alone, the yardstick) or w4.
        draft: auto, off or 0…7. layout: on cuda also w8 (over a 16-bit cache) or two_copies.
        kernels_folder: cuda's machine code, for the process. Raises CheckpointError,
        BackendUnavailable, BudgetError, UsageError.
        """
        arguments.quantised_view(view)
        if threads is not None:
            threads = arguments.thread_count(threads)
        if budget_bytes is not None:
            budget_bytes = arguments.whole_number("budget_bytes", budget_bytes, 0)
        reserve_bytes = arguments.whole_number("reserve_bytes", reserve_bytes, 0)
        if not isinstance(path, Checkpoint):
            path = Checkpoint(arguments.folder("path", path))
        manifest, spec = path.manifest, path.manifest.spec
        _use_kernels(kernels_folder)
        name, why = kernels.choose_backend(
            arguments.word("backend", backend), spec.head_dim, spec.num_heads // spec.num_kv_heads
        )
        held = arguments.layout(layout, name)
        context = fit_context(
            spec, ctx, name, budget_bytes, reserve_bytes,
            layout=held, group_size=manifest.group_size, threads=threads,
        )  # fmt: skip
        policy = parse_policy(arguments.word("kv_policy", kv_policy))
        source = arguments.word("draft_source", draft_source)
        choice = choose_draft(arguments.word("draft", draft), source, view, name)
        tokenizer = load_tokenizer(path)
        return cls(
            load_model(path, name, context, threads, held),
            tokenizer,
            manifest.text,
            view=cast(Views, view),
            context=context,
            draft=choice,
            policy=policy,
            synthetic=manifest.synthetic is not None,
            backend_why=why,
            group_size=manifest.group_size,
            layout=held,
            watch=MemoryWatch(reserve_bytes),
            model_sha256=path.sha256,
        )

    def generate(
        self,
        prompt: PromptLike,
        *,
        max_new_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        allowed_ids: Sequence[int] | None = None,
        constraint: Constraint | None = None,
        logprobs: int | None = None,
        deadline_s: float | None = None,
        draft_source: DraftSource | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> Generation:
        """Start a generation and return it: an iterator of tokens with `.result`.

        prompt: text (completed as it is), chat messages, token ids, or spans of ids and embedding
        rows fp32 [n, H] in the original model's basis. max_new_tokens None: up to the context.
        allowed_ids: the only ids that may be chosen; constraint: a rule instead, such as a grammar.
        template: more for the chat template, such as tools and enable_thinking. logprobs: tokens
        carry their log-probability and so many alternatives. deadline_s: return what is there by
        then, flagged `late`. Starting a new generation ends one that was left unfinished. Raises
        UsageError, ContextError for a prompt that does not fit, and MemoryPressure while other
        processes hold the memory that was to stay free.
        """
        if self._closed:
            raise UsageError("the engine is closed", "open it again with Engine.open")
        if sampling is not None and not isinstance(sampling, Sampling):
            raise UsageError(f"sampling: expected a Sampling, got {arguments.shown(sampling)}")
        self.end_running()
        spans, continues = self._spans(prompt, template or {})
        parsed, room = self._parsed(spans)
        if max_new_tokens is not None:
            room = min(room, arguments.whole_number("max_new_tokens", max_new_tokens, 1))
        if allowed_ids is not None and constraint is not None:
            raise UsageError("allowed_ids and constraint: expected one of them, got both")
        if allowed_ids is not None:
            ids = arguments.token_ids("allowed_ids", allowed_ids, self.num_tokens)
            constraint = AllowedIds(ids)
        if logprobs is not None:
            logprobs = arguments.whole_number("logprobs", logprobs, 0, MOST_ALTERNATIVES)
        if deadline_s is not None:
            deadline_s = arguments.seconds("deadline_s", deadline_s)
        arguments.draft_source(draft_source)
        self._need_memory()
        self._running = Generation(
            self,
            parsed,
            max_new_tokens=room,
            sampling=sampling or Sampling(),
            stop=arguments.texts("stop", stop),
            continues=continues,
            ignore_eos=arguments.yes_or_no("ignore_eos", ignore_eos),
            constraint=constraint,
            logprobs=logprobs,
            deadline_s=deadline_s,
            draft_source=draft_source,
        )
        return self._running

    def encode_chat(self, messages: Messages, **variables: Any) -> list[int]:
        """Render messages with the model's chat template, which gets the variables too. Raises
        UsageError without one."""
        t = self.text
        return self.template.encode(
            self.tokenizer, messages, bos_id=t.bos_id, add_bos=t.add_bos, **variables
        )

    def encode_text(self, text: str) -> list[int]:
        """Encode plain text, BOS first if the model wants one; special names stay text."""
        ids = self.tokenizer.encode(text, allow_special=False)
        t = self.text
        return [t.bos_id, *ids] if t.add_bos and t.bos_id is not None else ids

    def memory(self) -> dict[str, int]:
        """Bytes: weights as the backend holds them, KV cache, the rest, and the process's peak.

        With a GPU the rest and the peak are of its own memory, or of the pool that it shares with
        the process; what torch holds, the CUDA context and the process are lines of their own.
        """
        rss, peak, backend = (
            psutil.Process().memory_info().rss,
            peak_rss_bytes(),
            self.model.backend,
        )
        weights, kv = backend.weights_bytes, self.cache.num_bytes
        gpu = getattr(backend, "device_memory", dict[str, int])()
        used = rss
        if gpu:
            alone = backend.discrete  # type: ignore[attr-defined]
            used = gpu["device_bytes"] + (0 if alone else rss)
            lines = {"rss_bytes": rss, "rss_peak_bytes": peak}
            peak = gpu["device_peak_bytes"] + gpu["context_bytes"] + (0 if alone else peak)
            gpu = gpu | lines
        return {
            "weights_bytes": weights,
            "kv_bytes": kv,
            "workspace_bytes": max(0, used - weights - kv),
            "peak_bytes": peak,
        } | gpu

    def relieve(self, kept: int | None = None) -> int:
        """Give memory back that is not needed now and return how much in bytes; no token changes.

        kept: computed tokens to keep in the cache, all by default; what goes is computed again.
        """
        process = psutil.Process()
        before = process.memory_info().rss
        if kept is not None:
            del self._keys[kept:]
        length = len(self._keys) if kept is None else kept
        self.model.backend.relieve(self.cache, length, running=self._running is not None)
        freed = max(0, before - process.memory_info().rss)
        level = logging.WARNING if self.watch.fell else logging.DEBUG
        log.log(level, "memory is low: gave %.1f MiB back", freed / 2**20)
        return freed

    def close(self) -> None:
        """End a running generation and free the weights."""
        self.end_running()
        self._closed = True
        self.model.backend.close()

    def __enter__(self) -> Engine:
        """Return self."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _need_memory(self) -> None:
        """Give back what can be, then refuse new work while memory is low."""
        for kept in (None, 0):
            if not self.watch.look():
                return
            self.relieve(kept)
        self.watch.refuse_new_work()

    # for Generation

    def reuse(self, keys: list[Key]) -> int:
        """Cut the cache to the prefix it shares with `keys`, never all of them; return its size."""
        shared = common(self._keys, keys[:-1])
        del self._keys[shared:]
        if self.prefix is not None:
            shared = self.prefix.restore(self.cache, keys[:-1], shared)
            self._keys = keys[:shared]
        return shared

    def holds(self, keys: Sequence[Key]) -> bool:
        """Say whether the cache begins with these."""
        return self._keys[: len(keys)] == list(keys)

    def filled(self, keys: Sequence[Key]) -> None:
        """Note that the next positions of the cache hold these."""
        self._keys.extend(keys)

    def device_cycles(self) -> Cycles | None:
        """Return what drafts and verifies by itself, or None where the backend does not, and for a
        target that reads less of the cache than cycles do."""
        backend = self.model.backend
        if self.model.policy != KV8:
            return None
        kind = self.target_view, self.policy.recent  # measurements change these, in turns
        if kind not in self._cycles and isinstance(backend, RunsCycles):
            target, draft = (self.model.program(view) for view in (self.target_view, "w4"))
            self._cycles[kind] = backend.cycles(target, draft, self.cache, self.policy.recent)
        return self._cycles.get(kind)

    def note(self, phase: PhaseName, started: float, ended: float | None = None) -> None:
        """Note that a phase that began at `started` is over, for who measures energy."""
        if self.phases is not None:
            self.phases.append((phase, started, ended or time.perf_counter()))

    def ended(self, generation: Generation) -> None:
        """Note that a generation is over."""
        if self._running is generation:
            self._running = None

    def end_running(self) -> None:
        """End a generation that was left unfinished."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def new_stream(self, stop: Sequence[str], *, continues: bool) -> TextStream:
        """Return a detokeniser for one answer; `continues`: it goes on with the prompt's text."""
        return TextStream(self.tokenizer, stop, continues=continues)

    @property
    def num_tokens(self) -> int:
        """Ids that exist: padding rows of the vocabulary are cut off."""
        return min(self.text.num_tokens, self.model.spec.vocab_size)

    def _parsed(self, spans: list[Span]) -> tuple[Prompt, int]:
        """Return a prompt and how many tokens fit behind it. Raises ContextError for none."""
        parsed = Prompt(spans, self.model.spec.hidden_size, self.num_tokens)
        room = self.context - len(parsed)
        if room < 1:
            most = self.model.spec.max_position
            raise ContextError(
                f"the prompt has {len(parsed)} tokens, the context holds {self.context} "
                "and at least 1 must be left for the answer",
                "shorten the prompt"
                + (f", or allocate more: --ctx up to {most}" if self.context < most else ""),
            )
        return parsed, room

    def _spans(self, prompt: PromptLike, template: Mapping[str, Any]) -> tuple[list[Span], bool]:
        """Return the spans of a prompt, and whether the answer continues its text."""
        if isinstance(prompt, str):
            self.tokenizer.check_fits(prompt, self.context)
            return [self.encode_text(prompt)], True
        items = arguments.prompt_items(prompt)
        if items and isinstance(items[0], Mapping):
            return [self.encode_chat(items, max_tokens=self.context, **template)], False
        if items and isinstance(items[0], (np.ndarray, list, tuple)):
            return items, True
        return [items], True


def _use_kernels(folder: str | Path | None) -> None:
    if folder is not None:
        kernels.use_folder(arguments.folder("kernels_folder", folder), "kernels_folder")
