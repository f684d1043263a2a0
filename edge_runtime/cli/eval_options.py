"""The options of `bitnest-edge eval`, and what they mean to a task.

Invariant: an option that a task does not use is refused with it, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from edge_runtime.cli.model import original_option
from edge_runtime.cli.options import TEXT, F, Finite, Parsed, Whole, user_path
from edge_runtime.errors import UsageError, cut

if TYPE_CHECKING:
    from edge_runtime.evaluate.build import Options

TASKS = ("ppl", "gsm8k", "agreement", "acceptance", "jsonl")
MAX_ITEMS = 64  # of a list given to one option
DEFAULT_VIEWS = {
    "ppl": "nest,w4",
    "gsm8k": "nest",
    "jsonl": "nest",
    "agreement": "w8a8,nest,w4,draft,draft:kv4",
}
# what an option changes; given with another task it is refused
USED_BY: dict[str, tuple[str, ...]] = {
    "views": ("ppl", "gsm8k", "agreement", "jsonl"),
    "window": ("ppl", "agreement"),
    "stride": ("ppl", "agreement"),
    "new_tokens": ("gsm8k", "agreement", "acceptance", "jsonl"),
    "num_fewshot": ("gsm8k",),
    "fewshot": ("gsm8k",),
    "metric": ("jsonl",),
    "template": ("jsonl",),
    "stop": ("gsm8k", "jsonl"),
    "gamma": ("acceptance",),
    "kv_policy": ("acceptance",),
    "draft_source": ("acceptance",),
    "prefix": ("acceptance",),
    "chat": ("gsm8k", "agreement", "acceptance", "jsonl"),
    "temp": ("gsm8k", "acceptance", "jsonl"),
    "seed": ("gsm8k", "acceptance", "jsonl"),
    "ignore_eos": ("acceptance", "jsonl"),
}


def _listed(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Return a parser of `a,b,c`, each once, in the order given."""

    def parsed(text: str) -> tuple[Any, ...]:
        items = tuple(dict.fromkeys(parse(part.strip()) for part in text.split(",")))
        if len(items) > MAX_ITEMS:
            raise ValueError(f"expected at most {MAX_ITEMS}, got {len(items)}")
        return items

    return parsed


def _view(text: str) -> Any:
    from edge_runtime.evaluate.views import parse_view

    return parse_view(text)


def _policy(text: str) -> Any:
    from edge_runtime.cache.policy import parse_policy

    return parse_policy(text)


def _source(text: str) -> str:
    if text not in ("base", "both", "ngram"):
        raise ValueError(f"expected some of base,both,ngram, got {cut(text)!r}")
    return text


def _number(low: int, high: int) -> Callable[[str], int]:
    def parsed(text: str) -> int:
        from edge_runtime.decode.arguments import digits

        if (number := digits(text)) is None or not low <= number <= high:
            raise ValueError(f"expected whole numbers from {low} to {high}, got {cut(text)!r}")
        return number

    return parsed


def _gamma(text: str) -> int:
    """Return a draft length, 0 for auto."""
    if text == "auto":
        return 0
    try:
        return _number(1, 7)(text)
    except ValueError as error:
        raise ValueError(f"{error}, nor auto") from None


VIEWS = Parsed("views", _listed(_view))
POLICIES = Parsed("policies", _listed(_policy))
SOURCES = Parsed("sources", _listed(_source))
GAMMAS = Parsed("gammas", _listed(_gamma))
PREFIXES = Parsed("tokens", _listed(_number(1, 10**7)))

_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--task", type=click.Choice(TASKS), required=True, help="What is measured; see above."
    ),
    click.option(
        "--data",
        "files",
        type=Parsed("file", user_path),
        multiple=True,
        required=True,
        metavar="FILE",
        help="JSON lines or text, recognised by its fields; repeatable, each file a workload.",
    ),
    click.option(
        "--views",
        type=VIEWS,
        metavar="V,…",
        help="Some of fp, w8a8, nest, w8, w4, w4a16, draft; NAME:POLICY says what is read of the "
        "KV cache (nest:kv4).  [default: ppl nest,w4; agreement w8a8,nest,w4,draft,draft:kv4; else "
        "nest]",
    ),
    original_option,
    click.option(
        "--limit",
        type=Whole(min=1),
        metavar="N",
        help="The first N rows, windows or prefixes of each file.",
    ),
    click.option(
        "--window",
        type=Whole(min=2),
        metavar="N",
        help="ppl, agreement: tokens of a window of text.  [default: 2048, or what fits]",
    ),
    click.option(
        "--stride",
        type=Whole(min=1),
        metavar="N",
        help="ppl, agreement: tokens from one window to the next.  [default: a window]",
    ),
    click.option(
        "-n",
        "--new-tokens",
        type=Whole(min=1),
        metavar="N",
        help="Tokens of an answer, at most.  [default: 128]",
    ),
    click.option(
        "--num-fewshot",
        type=Whole(min=0),
        metavar="N",
        help="gsm8k: examples before the question.  [default: 8]",
    ),
    click.option(
        "--fewshot",
        type=Parsed("file", user_path),
        metavar="FILE",
        help="gsm8k: rows of the training split; the first are the examples.",
    ),
    click.option(
        "--metric",
        type=click.Choice(["exact", "f1", "rouge_l", "accuracy"]),
        help="jsonl: how an answer is scored.",
    ),
    click.option(
        "--template",
        type=TEXT,
        metavar="TEXT",
        help="jsonl: the prompt, with {field} for a row's fields.  [default: context, then what is "
        "asked]",
    ),
    click.option(
        "--stop",
        type=TEXT,
        multiple=True,
        metavar="S",
        help='End an answer before this text; repeatable.  [default: gsm8k "Question:"]',
    ),
    click.option(
        "--gamma",
        type=GAMMAS,
        metavar="N,…",
        help="acceptance: draft lengths; auto: as the engine chooses.  [default: 1,2,4,7]",
    ),
    click.option(
        "--kv-policy",
        type=POLICIES,
        metavar="P,…",
        help="acceptance: what drafting reads of the KV cache.  [default: kv8,kv4]",
    ),
    click.option(
        "--draft-source",
        type=SOURCES,
        metavar="S,…",
        help="acceptance: base, both (with look-up), ngram (look-up alone).  [default: base,both]",
    ),
    click.option(
        "--prefix",
        type=PREFIXES,
        metavar="N,…",
        help="acceptance: tokens of a text that is gone on with.  [default: 2048, or what fits]",
    ),
    click.option(
        "--chat/--raw",
        default=None,
        help="Prompts as a user's message, or as plain text.  [default: chat where the model has a "
        "template; gsm8k raw]",
    ),
    click.option("--temp", type=Finite(min=0), help="Temperature; 0 is greedy.  [default: 0]"),
    click.option(
        "--seed", type=Whole(0, 2**64 - 1), metavar="S", help="Of sampling.  [default: 0]"
    ),
    click.option("--ignore-eos", is_flag=True, default=None, help="Go on after the end token."),
    click.option(
        "--resume",
        type=Parsed("file", user_path),
        metavar="FILE",
        help="Keep finished items there, and go on from those that are.",
    ),
)


def task_options(command: F) -> F:
    """Add the options that a task reads, in this order."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def make_options(asked: dict[str, Any]) -> Options:
    """Check what was asked for against the task. Raises UsageError."""
    from edge_runtime.decode.sampling import Sampling
    from edge_runtime.evaluate import data
    from edge_runtime.evaluate.build import Options

    task = asked["task"]
    for name, tasks in USED_BY.items():
        if asked[name] not in (None, ()) and task not in tasks:
            flag = "--chat and --raw" if name == "chat" else "--" + name.replace("_", "-")
            raise UsageError(f"{flag}: of no effect with --task {task}; used by {', '.join(tasks)}")
    if asked["seed"] is not None and not asked["temp"]:
        raise UsageError("--seed: of no effect without --temp above 0")
    views = asked["views"]
    if views is None and task in DEFAULT_VIEWS:
        views = VIEWS.convert(DEFAULT_VIEWS[task], None, None)
    if task != "agreement" and any(v.name == "draft" for v in views or ()):
        raise UsageError("--views draft is for --task agreement; of the rest w4 is the base plane")
    chosen = {
        "views": views,
        "gammas": asked["gamma"] or (1, 2, 4, 7),
        "policies": asked["kv_policy"] or _listed(_policy)("kv8,kv4"),
        "sources": asked["draft_source"] or ("base", "both"),
        "prefixes": asked["prefix"],
        "sampling": Sampling(temperature=asked["temp"] or 0.0, seed=asked["seed"] or 0),
        "fewshot": None if asked["fewshot"] is None else data.read(asked["fewshot"]),
        "ignore_eos": bool(asked["ignore_eos"]),
    }
    kept = ("window", "stride", "limit", "new_tokens", "num_fewshot", "metric", "template")
    chosen |= {name: asked[name] for name in (*kept, "stop", "chat")}
    return Options(task=task, **{k: v for k, v in chosen.items() if v is not None})
