"""From options and data files to a task with its items.

Invariant: everything that a result depends on, besides the model, is in `Options` or in the files'
hashes; `identity` is what a file of finished items is bound to. `limit` is not part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from edge_runtime.cache.policy import KvPolicy
from edge_runtime.decode.draft import SourceName
from edge_runtime.decode.sampling import Sampling
from edge_runtime.errors import CheckpointError, UsageError
from edge_runtime.evaluate import data, metrics
from edge_runtime.evaluate.acceptance import Acceptance, ways
from edge_runtime.evaluate.agreement import Agreement
from edge_runtime.evaluate.answers import GSM8K_STOP, Answers
from edge_runtime.evaluate.data import DataFile
from edge_runtime.evaluate.items import Cut, Encoder, Item, Task, fitting, windows
from edge_runtime.evaluate.ppl import Perplexity
from edge_runtime.evaluate.views import ViewSpec

TaskName = Literal["ppl", "gsm8k", "agreement", "acceptance", "jsonl"]
TASKS: tuple[TaskName, ...] = ("ppl", "gsm8k", "agreement", "acceptance", "jsonl")
WINDOW = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a task is run; what a task does not use has its default."""

    task: TaskName
    views: tuple[ViewSpec, ...] = ()
    limit: int | None = None  # rows, windows or prefixes of each file
    window: int | None = None
    stride: int | None = None
    new_tokens: int = 128
    num_fewshot: int = 8
    fewshot: DataFile | None = None
    metric: str | None = None
    template: str | None = None
    stop: tuple[str, ...] = ()
    gammas: tuple[int, ...] = ()
    policies: tuple[KvPolicy, ...] = ()
    sources: tuple[SourceName, ...] = ()
    prefixes: tuple[int, ...] = ()  # none: WINDOW, or what fits
    chat: bool | None = None
    sampling: Sampling = field(default_factory=Sampling)
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A task, and what a document says of how it was made."""

    task: Task
    facts: dict[str, Any]


def build(options: Options, files: Sequence[DataFile], encoder: Encoder, room: int) -> Built:
    """Make the items of a task. room: the longest context there may be.

    Raises UsageError, CheckpointError for data that does not suit the task, ContextError where
    nothing fits.
    """
    data.refuse_same_names(files)
    makers: dict[TaskName, Callable[[], Built]] = {
        "ppl": lambda: _ppl(options, files, encoder, room),
        "gsm8k": lambda: _gsm8k(options, files, encoder, room),
        "agreement": lambda: _agreement(options, files, encoder, room),
        "acceptance": lambda: _acceptance(options, files, encoder, room),
        "jsonl": lambda: _jsonl(options, files, encoder, room),
    }
    return makers[options.task]()


def identity(options: Options, files: Sequence[DataFile], built: Built) -> dict[str, Any]:
    """Return what records depend on, besides the model and the backend."""
    s = options.sampling
    found: dict[str, Any] = {
        "task": options.task,
        "data": [[f.name, f.kind, f.sha256] for f in files],
        "views": [str(v) for v in options.views],
        "new_tokens": options.new_tokens,
        "sampling": {"temperature": s.temperature, "seed": s.seed},
        "ignore_eos": options.ignore_eos,
        "chat": built.facts.get("chat"),
    }
    for name in ("window", "stride"):
        found[name] = built.facts.get(name)
    if options.task == "gsm8k":
        found["num_fewshot"] = options.num_fewshot
        found["fewshot"] = options.fewshot.sha256 if options.fewshot else None
    if options.task in ("gsm8k", "jsonl"):
        found["metric"], found["template"] = options.metric, options.template
        found["stop"] = list(options.stop)
    if options.task == "acceptance":
        found["gamma"] = [g or "auto" for g in options.gammas]
        found["draft_source"] = list(options.sources)
        found["kv_policy"] = [str(p) for p in options.policies]
        found["prefix"] = built.facts.get("prefix")
    return found


def _ppl(options: Options, files: Sequence[DataFile], encoder: Encoder, room: int) -> Built:
    data.refuse_kinds(files, "ppl", ("text", *data.WHOLE))
    items, facts = _windows(options, files, encoder, room)
    return Built(task=Perplexity(items, options.views), facts=facts)


def _agreement(options: Options, files: Sequence[DataFile], encoder: Encoder, room: int) -> Built:
    texts = [f for f in files if f.kind == "text"]
    asked = [f for f in files if f.kind != "text"]
    items, facts = _windows(options, texts, encoder, room) if texts else ([], {})
    if asked:
        prompts, skipped = _prompts(options, asked, encoder, room)
        items = [*prompts, *items]
        facts = facts | skipped
    task = Agreement(
        items, options.views, new_tokens=options.new_tokens, prompts={f.name for f in asked}
    )
    return Built(task=task, facts=facts)


def _acceptance(options: Options, files: Sequence[DataFile], encoder: Encoder, room: int) -> Built:
    texts = [f for f in files if f.kind == "text"]
    asked = [f for f in files if f.kind != "text"]
    facts: dict[str, Any] = {}
    items: list[Item] = []
    if asked:
        items, facts = _prompts(options, asked, encoder, room)
    if texts:
        prefixes = options.prefixes or (min(WINDOW, room - options.new_tokens),)
        facts = facts | {"prefix": list(prefixes)}
        for file in texts:
            items += _prefixes(options, file, encoder, room, prefixes)
    task = Acceptance(
        items,
        ways(options.gammas, options.sources, options.policies),
        new_tokens=options.new_tokens,
        sampling=options.sampling,
        ignore_eos=options.ignore_eos,
    )
    return Built(task=task, facts=facts)


def _gsm8k(options: Options, files: Sequence[DataFile], encoder: Encoder, room: int) -> Built:
    data.refuse_kinds(files, "gsm8k", ("gsm8k",))
    examples = _examples(options, files)
    chat = bool(options.chat)

    def ids(row: data.Row) -> list[int]:
        text = f"{examples}Question: {row['question']}\nAnswer:"
        return _encoded(encoder, text, chat)

    items = _row_items(options, files, ids)
    items, skipped = fitting(items, room, options.new_tokens)
    task = Answers(
        "gsm8k",
        items,
        options.views,
        lambda answer, item: metrics.gsm8k_scores(answer, item.row["answer"]),
        new_tokens=options.new_tokens,
        sampling=options.sampling,
        stop=options.stop or GSM8K_STOP,
    )
    facts = {"chat": chat, "skipped_too_long": skipped, "num_fewshot": options.num_fewshot}
    return Built(task=task, facts=facts)


def _examples(options: Options, files: Sequence[DataFile]) -> str:
    """The first rows of the example file, as the prompt begins with them."""
    if not options.num_fewshot:
        return ""
    file = options.fewshot
    if file is None:
        raise UsageError(
            f"--task gsm8k with {options.num_fewshot} examples needs rows to take them from",
            "give rows of the training split: --fewshot FILE, or --num-fewshot 0",
        )
    data.refuse_kinds([file], "gsm8k --fewshot", ("gsm8k",))
    if any(file.sha256 == other.sha256 for other in files):
        raise UsageError("--fewshot: the examples would be the questions of --data themselves")
    if len(file.rows) < options.num_fewshot:
        raise CheckpointError(
            f"{file.name}: expected {options.num_fewshot} examples, got {len(file.rows)}"
        )
    return "".join(
        f"Question: {row['question']}\nAnswer: {row['answer']}\n\n"
        for row in file.rows[: options.num_fewshot]
    )


def _jsonl(options: Options, files: Sequence[DataFile], encoder: Encoder, room: int) -> Built:
    if options.metric is None:
        raise UsageError("--task jsonl needs a metric", f"--metric {'|'.join(metrics.METRICS)}")
    for file in files:
        for number, row in enumerate(file.rows, 1):
            if not data.references(row):
                raise CheckpointError(f"{file.name}, row {number}: it has no answer")
        if not file.rows:
            data.refuse_kinds([file], "jsonl", ("answers", "gsm8k"))
    chat = encoder.has_template if options.chat is None else options.chat
    metric, name = metrics.METRICS[options.metric], options.metric

    def ids_of(file: DataFile) -> Callable[[data.Row], list[int]]:
        def ids(row: data.Row) -> list[int]:
            if options.template is not None:
                return _encoded(encoder, data.fill(options.template, row, file.name), chat)
            messages = data.messages(file.kind, row)
            return _encoded(encoder, messages, chat)

        return ids

    items = [item for file in files for item in _row_items(options, [file], ids_of(file))]
    items, skipped = fitting(items, room, options.new_tokens)
    task = Answers(
        "jsonl",
        items,
        options.views,
        lambda answer, item: {
            name: metric(answer, data.references(item.row), data.classes(item.row))
        },
        new_tokens=options.new_tokens,
        sampling=options.sampling,
        stop=options.stop,
        ignore_eos=options.ignore_eos,
    )
    return Built(task=task, facts={"chat": chat, "skipped_too_long": skipped})


def _prompts(
    options: Options, files: Sequence[DataFile], encoder: Encoder, room: int
) -> tuple[list[Item], dict[str, Any]]:
    """Rows as prompts: chats where the model has a template."""
    chat = encoder.has_template if options.chat is None else options.chat
    items = [
        item
        for file in files
        for item in _row_items(
            options,
            [file],
            lambda row, kind=file.kind: _encoded(  # type: ignore[misc]
                encoder, data.messages(kind, row), chat
            ),
        )
    ]
    items, skipped = fitting(items, room, options.new_tokens)
    return items, {"chat": chat, "skipped_too_long": skipped}


def _row_items(
    options: Options, files: Sequence[DataFile], ids: Callable[[data.Row], list[int]]
) -> list[Item]:
    """Return the first rows of files as items. Raises UsageError, naming the row, for one that the
    model's chat template refuses."""
    items = []
    for file in files:
        for number, row in enumerate(file.rows[: options.limit]):
            try:
                prompt = ids(row)
            except UsageError as error:
                where = f"{file.name}, row {number + 1}: "
                raise UsageError(where + error.message, error.hint) from None
            key = f"{file.name}/{number}"
            items.append(Item(key=key, workload=file.name, ids=prompt, row=row))
    return items


def _encoded(encoder: Encoder, prompt: str | list[data.Message], chat: bool) -> list[int]:
    if chat:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return encoder.chat(messages)
    text = prompt if isinstance(prompt, str) else "\n\n".join(m["content"] for m in prompt)
    return encoder.completion(text)


def _windows(
    options: Options, files: Sequence[DataFile], encoder: Encoder, room: int
) -> tuple[list[Item], dict[str, Any]]:
    """Windows of texts, and what a document says of them."""
    window = min(WINDOW, room) if options.window is None else options.window
    if window > room:
        raise UsageError(f"--window {window}: the context is at most {room}")
    size = window - len(encoder.bos)
    stride = size if options.stride is None else options.stride
    if not 1 <= stride <= size:
        raise UsageError(f"--stride: expected 1 to {size}, got {stride}")
    items: list[Item] = []
    left = 0
    for file in files:
        cut: Cut = windows(file, encoder.plain(data.whole_text(file)), window, stride, encoder.bos)
        if not cut.items:
            raise CheckpointError(f"{file.name}: expected at least two tokens of text")
        items += cut.items[: options.limit]
        left += cut.tokens_left_out
    return items, {
        "window": window,
        "stride": stride,
        "bos": bool(encoder.bos),
        "tail_tokens": left,
        "counted": "every token but the first of the first window, then the last `stride` tokens "
        "of each window that have one before them",
    }


def _prefixes(
    options: Options, file: DataFile, encoder: Encoder, room: int, prefixes: Sequence[int]
) -> list[Item]:
    """Beginnings of a text to go on with: one after another, all lengths ending at one place."""
    ids, bos = encoder.plain(file.text), encoder.bos
    longest = max(prefixes)
    if min(prefixes) <= len(bos):
        raise UsageError(f"--prefix: expected at least {len(bos) + 1}, got {min(prefixes)}")
    if longest + options.new_tokens > room:
        raise UsageError(
            f"--prefix {longest} and {options.new_tokens} new tokens: the context is at most {room}"
        )
    ends = list(range(longest - len(bos), len(ids), longest))[: options.limit]
    if not ends:
        raise CheckpointError(f"{file.name}: expected {longest} tokens of text, got {len(ids)}")
    return [
        Item(
            key=f"{file.name}/{end}/{prefix}",
            workload=f"{file.name} {prefix}" if len(prefixes) > 1 else file.name,
            ids=[*bos, *ids[end - prefix + len(bos) : end]],
        )
        for prefix in prefixes
        for end in ends
    ]
