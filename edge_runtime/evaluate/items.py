"""What a task runs over, and how prompts become token ids before any weight is loaded.

Invariant: an item's key names its file and its place there and nothing else, so that a run with a
larger --limit goes on from the records of a smaller one.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from edge_runtime.decode.load import load_tokenizer
from edge_runtime.decode.sampling import Sampling
from edge_runtime.errors import ContextError
from edge_runtime.evaluate.data import DataFile, Row
from edge_runtime.evaluate.resume import Finished, Record
from edge_runtime.evaluate.views import Views
from edge_runtime.format.reader import Checkpoint
from edge_runtime.text.template import ChatTemplate


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One unit of work. ids: a prompt, or a whole window; first: the first row that counts."""

    key: str
    workload: str
    ids: list[int]
    first: int = 0
    row: Row = field(default_factory=dict)


def seeded(sampling: Sampling, item: Item) -> Sampling:
    """Give an item noise of its own, which depends on the seed and on its key alone."""
    seed = (sampling.seed + zlib.crc32(item.key.encode())) % 2**64
    return dataclasses.replace(sampling, seed=seed)


class Task(Protocol):
    """What eval can measure."""

    name: str
    items: list[Item]

    @property
    def context(self) -> int:
        """Tokens that an engine must hold."""
        ...

    def run(self, item: Item, views: Views) -> Record:
        """Run one item and return its sums and counts."""
        ...

    def rows(self, records: Mapping[str, Sequence[Record]]) -> dict[str, Any]:
        """Return what a document says of records by workload: rows, pairs and more."""
        ...


class Progress(Protocol):
    """Told how far a run is."""

    def __call__(self, done: int, total: int, what: str) -> None:
        """`done` of `total` items are over and `what` runs now."""
        ...


class Encoder:
    """Tokens of text and chats, as `Engine` makes them, without an engine."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Read the tokenizer."""
        self._text = checkpoint.manifest.text
        self.tokenizer = load_tokenizer(checkpoint)
        t = self._text
        self._template = ChatTemplate(t.chat_template, bos_token=t.bos_token, eos_token=t.eos_token)

    @property
    def has_template(self) -> bool:
        """Whether the model was made for chat."""
        return self._template.has_template

    @property
    def bos(self) -> list[int]:
        """What a text begins with: BOS, where the model wants one."""
        t = self._text
        return [t.bos_id] if t.add_bos and t.bos_id is not None else []

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of messages."""
        t = self._text
        return self._template.encode(self.tokenizer, messages, bos_id=t.bos_id, add_bos=t.add_bos)

    def completion(self, text: str) -> list[int]:
        """Return the ids of a text to continue."""
        return self.bos + self.plain(text)

    def plain(self, text: str) -> list[int]:
        """Return the ids of a text, nothing before it."""
        return self.tokenizer.encode(text, allow_special=False)


def windows(file: DataFile, ids: Sequence[int], window: int, stride: int, bos: list[int]) -> Cut:
    """Cut a text into windows of `window` tokens, each `stride` behind the last.

    A window begins with `bos`, if there is any, as one of its tokens. Of the first window every
    token that has one before it is predicted and counts; of the others the last `stride`. A last
    window that would be shorter is left out, unless it is the only one.
    """
    size = window - len(bos)
    found = []
    starts = range(0, max(1, len(ids) - size + 1), stride)
    for number, a in enumerate(starts):
        part = [*bos, *ids[a : a + size]]
        counted = len(part) - stride if number else 0
        found.append(
            Item(
                key=f"{file.name}/{a}",
                workload=file.name,
                ids=part,
                first=max(0, counted - 1),
            )
        )
    left = max(0, len(ids) - (starts[-1] + size))
    return Cut([i for i in found if len(i.ids) > i.first + 1], left)


@dataclass(frozen=True, slots=True)
class Cut:
    """Windows of a text, and how many of its tokens are in none."""

    items: list[Item]
    tokens_left_out: int


def fitting(items: Iterable[Item], room: int, answer: int) -> tuple[list[Item], int]:
    """Return the items that leave room for an answer, and how many do not.

    Raises ContextError if none does.
    """
    all_items = list(items)
    fit = [i for i in all_items if len(i.ids) + answer <= room]
    if not fit:
        longest = min((len(i.ids) for i in all_items), default=0)
        raise ContextError(
            f"no prompt fits: the shortest of {len(all_items)} has {longest} tokens, the answer "
            f"takes {answer} and the context holds {room}",
            "raise --ctx, or lower -n",
        )
    return fit, len(all_items) - len(fit)


def run_items(
    task: Task, views: Views, finished: Finished, progress: Progress
) -> dict[str, list[Record]]:
    """Run what is not finished; return the records of all items by workload, in order."""
    done = sum(1 for item in task.items if item.key in finished.records)
    found: dict[str, list[Record]] = {}
    for item in task.items:
        record = finished.records.get(item.key)
        if record is None:
            progress(done, len(task.items), f"{item.workload}, item {done + 1}")
            record = finished.add(item.key, task.run(item, views))
            done += 1
        found.setdefault(item.workload, []).append(record)
    progress(done, len(task.items), "done")
    return found
