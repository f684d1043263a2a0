"""A prompt's fixed beginning, kept in a file and put back into an engine's cache.

Invariant: answers are those without it, bit for bit. The engine begins with it again whenever a
prompt shares more with it than with what the cache holds, so it outlives other conversations.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from edge_runtime.cache import prompt_file
from edge_runtime.decode.request import Key
from edge_runtime.errors import CheckpointError, ContextError, UsageError
from edge_runtime.kernels.ops import Cache
from edge_runtime.model.transformer import geometry

if TYPE_CHECKING:
    from edge_runtime.decode.engine import Engine
    from edge_runtime.decode.session import Session
    from edge_runtime.kernels.ops import Geometry

log = logging.getLogger(__name__)


class Prefix:
    """A prompt's beginning in a file, for `Engine.prefix`."""

    def __init__(self, file: prompt_file.PromptFile) -> None:
        self.file, self.ids = file, file.ids

    def restore(self, cache: Cache, keys: Sequence[Key], shared: int) -> int:
        """Put what `keys` begin with into a cache, if that is more than `shared` positions; return
        how many are there then. A file that another process changed is not used again: what it put
        there before is as computed, and the rest is computed."""
        mine = common(self.ids, keys)
        if mine <= shared:
            return shared
        started = time.perf_counter()
        try:
            self.file.restore(cache, mine)
        except CheckpointError as error:
            log.warning("%s: prompts are computed without it", error.message)
            self.ids = []
            return shared
        log.debug("%d tokens from %s in %.0f ms", mine, self.file.path, _ms(started))
        return mine


def common(one: Sequence[Key], other: Sequence[Key]) -> int:
    """Return how many positions two texts share at their beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def load(engine: Engine, path: Path) -> Prefix:
    """Let an engine begin with what a file holds. Raises CheckpointError for a file of another
    model, view or version, ContextError for one that is longer than the context."""
    started = time.perf_counter()
    prefix = Prefix(prompt_file.PromptFile(path, bound(engine), _geometry(engine)))
    if len(prefix.ids) >= engine.context:
        raise ContextError(
            f"{path} holds {len(prefix.ids)} tokens, the context {engine.context}, and at least 1 "
            "must be left",
            "allocate more: --ctx N",
        )
    engine.end_running()
    engine.prefix = prefix
    log.info("prompts may begin with %d tokens of %s", len(prefix.ids), path)
    log.debug("proven in %.0f ms", _ms(started))
    return prefix


def save(engine: Engine, path: Path, ids: Sequence[int]) -> None:
    """Keep a prompt's beginning in a file, computing what of it the cache does not hold."""
    whole = list(ids)
    names = check(engine, path)
    if not engine.holds(whole):
        engine.generate(whole, max_new_tokens=1).complete()
    engine.end_running()
    if not engine.holds(whole):
        raise UsageError("the prompt's cache was given back before it was saved", "free memory")
    started = time.perf_counter()
    prompt_file.save(path, names, whole, engine.cache, _geometry(engine))
    size = path.stat().st_size / 2**20
    log.info("kept %d tokens in %s: %.1f MiB", len(whole), path, size)
    log.debug("written in %.0f ms", _ms(started))


def check(engine: Engine, path: Path) -> dict[str, str]:
    """Raise, before anything is computed, what `save` would raise; return `bound`."""
    prompt_file.check_writable(path)
    return bound(engine)


def begin(engine: Engine, path: Path, ids: Sequence[int]) -> None:
    """Load a file, or make it where there is none; `ids` are the fixed beginning of all prompts.

    Raises CheckpointError if the file holds another beginning.
    """
    if path.exists():
        check_ids(load(engine, path), ids)
    else:
        save(engine, path, ids)
        load(engine, path)


def check_ids(prefix: Prefix, ids: Sequence[int]) -> None:
    """Raise CheckpointError unless a prompt begins with what the file holds."""
    shared = common(prefix.ids, ids)
    if shared < len(prefix.ids):
        raise CheckpointError(
            f"{prefix.file.path}: made for another prompt: it holds {len(prefix.ids)} tokens, of "
            f"which this one begins with {shared}",
            f"give another file, or {prompt_file.BEGIN_AGAIN}",
        )


def chat_beginning(session: Session) -> list[int]:
    """Return the ids that every conversation with a session's system prompt begins with.

    Raises UsageError where the chat template puts nothing before a user's words.
    """
    texts = []
    for word in ("A", "7"):
        texts.append(session.prompt([*session.messages, {"role": "user", "content": word}]))
    ids: list[int] = texts[0][: common(*texts)]
    if not ids:
        raise UsageError(
            "a prompt's cache needs a fixed beginning, and this chat template has none",
            "give a system prompt: --system TEXT",
        )
    return ids


def bound(engine: Engine) -> dict[str, str]:
    """Return what the numbers of a cache depend on. Raises UsageError for a plain cache."""
    if engine.view == "fp" or engine.layout == "w8":
        raise UsageError(
            "a prompt's cache is kept of the nested KV cache, and this run has a 16-bit or float "
            "one",
            "leave --prompt-cache out, or --view fp",
        )
    if not engine.model_sha256:
        raise UsageError("a prompt's cache needs a converted model: open it with Engine.open")
    spec = engine.model.spec
    dynamic = spec.rope.kind == "dynamic"
    return {
        "model": engine.model_sha256,
        "view": engine.target_view,
        "shape": f"{spec.num_layers}x{spec.num_kv_heads}x{spec.head_dim}",
        # dynamic scaling is fixed by the context that was allocated (`model.rope`)
        "context": str(max(engine.context, spec.max_position)) if dynamic else "any",
    }


def _geometry(engine: Engine) -> Geometry:
    return geometry(engine.model.spec, engine.num_tokens)


def _ms(started: float) -> float:
    return (time.perf_counter() - started) * 1e3
