"""Data files: JSON lines of the usual sets, or plain text; recognised by their fields.

Invariant: a file is what its rows say, whatever its name; a file that fits nothing is refused with
the fields that were found. Rows keep the order of the file.

    kind           fields                                   asked of the model
    gsm8k          question, answer with "#### N"           the question
    humaneval      prompt, canonical_solution, entry_point  "Complete this Python function:" prompt
    mbpp           prompt or text, code, test_list          the prompt
    mt_bench       turns                                    the first turn
    conversations  conversations or messages                all turns up to the last user's
    answers        prompt, input, question and/or context;  context, blank line, the rest
                   answers or answer
    prompts        prompt or question                       it
    text           text, or a file that is not JSON         windows or prefixes of it
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_runtime.errors import CheckpointError, UsageError, cut
from edge_runtime.format.lfs import refuse_pointer

MAX_BYTES = 1 << 30
ASKED = ("prompt", "input", "question")
ANSWERS = ("answers", "answer", "outputs", "target")
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
ROLES |= {"system": "system"}
_FIELD = re.compile(r"\{(\w+)\}")
Message = dict[str, str]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file: rows, or (kind text) a text. name: for reports; sha256: of its bytes."""

    name: str
    kind: str
    rows: list[Row]
    text: str
    sha256: str


def read(path: Path) -> DataFile:
    """Read a data file. Raises CheckpointError for what is none."""
    if path.exists() and not path.is_file():  # a pipe may never end
        raise CheckpointError(f"{path}: expected a file, got a folder, a pipe or a device")
    refuse_pointer(path)
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise CheckpointError(f"{path}: expected at most {MAX_BYTES} bytes, got {size}")
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path}: expected UTF-8 text, got byte 0x{data[error.start]:02x} at {error.start}"
        ) from None
    text = text.replace("\r\n", "\n")
    if not text.strip():
        raise CheckpointError(f"{path}: there is nothing in it")
    digest, name = hashlib.sha256(data).hexdigest(), _printable(path.stem)
    rows = _rows(text, path)
    if rows is None:
        return DataFile(name, "text", [], text, digest)
    kinds = {kind_of(row): row for row in rows}
    if len(kinds) != 1 or None in kinds:
        raise _unknown(path, kinds)
    kind = str(next(iter(kinds)))
    if kind == "text":
        text = "\n\n".join(row["text"] for row in rows)
        return DataFile(name, kind, [], text, digest)
    return DataFile(name, kind, rows, "", digest)


def _printable(name: str) -> str:
    """Return a file's name as a document can carry it."""
    return name.encode("utf-8", "replace").decode()


def _rows(text: str, path: Path) -> list[Row] | None:
    """Return the objects of JSON lines or of a JSON array; None for other text, whatever it begins
    with, in a file whose name does not promise JSON."""
    first, promised = text.lstrip(), path.suffix.lower() in (".json", ".jsonl")
    if first.startswith("["):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            if promised:
                raise CheckpointError(f"{path}: not JSON") from None
            return None
        return value if value and all(isinstance(row, dict) for row in value) else None
    if not first.startswith("{"):
        return None
    rows: list[Row] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if not rows and not promised:
                return None  # a text that begins with a brace
            raise CheckpointError(f"{path}:{number}: not JSON") from None
        if not isinstance(row, dict):
            raise CheckpointError(f"{path}:{number}: expected a JSON object")
        rows.append(row)
    return rows


def _unknown(path: Path, kinds: dict[str | None, Row]) -> CheckpointError:
    if None in kinds:
        fields = cut(", ".join(kinds[None]), 80)
        return CheckpointError(
            f"{path}: expected rows with prompt, input, question, turns, conversations, messages "
            f"or text, and something in them, got {fields}",
            "see bitnest-edge eval --help for the kinds of data",
        )
    return CheckpointError(
        f"{path}: expected rows of one kind, got {', '.join(sorted(str(k) for k in kinds))}",
        "put them into files of their own",
    )


def kind_of(row: Row) -> str | None:
    """Name what a row is, by its fields."""
    if _texts(row, "question", "answer") and "####" in row["answer"]:
        return "gsm8k"
    if _texts(row, "prompt", "canonical_solution", "entry_point"):
        return "humaneval"
    if (
        _texts(row, "code")
        and "test_list" in row
        and (_texts(row, "prompt") or _texts(row, "text"))
    ):
        return "mbpp"
    if isinstance(row.get("turns"), list) and row["turns"] and isinstance(row["turns"][0], str):
        return "mt_bench"
    if conversation(row):
        return "conversations"
    if references(row) and (any(_texts(row, f) for f in ASKED) or _texts(row, "context")):
        return "answers"
    if _texts(row, "prompt") or _texts(row, "question"):
        return "prompts"
    return "text" if _texts(row, "text") else None


def _texts(row: Row, *fields: str) -> bool:
    return all(isinstance(row.get(f), str) and row[f].strip() for f in fields)


def conversation(row: Row) -> list[Message]:
    """Return the messages of a row up to the last of a user; none if it has none."""
    found: list[Message] = []
    turns = row.get("conversations") or row.get("messages")
    for turn in turns if isinstance(turns, list) else []:
        if not isinstance(turn, dict):
            return []
        role = ROLES.get(str(turn.get("from", turn.get("role"))))
        content = turn.get("value", turn.get("content"))
        if role is None or not isinstance(content, str):
            return []
        found.append({"role": role, "content": content})
    while found and found[-1]["role"] != "user":
        found.pop()
    return found


def references(row: Row) -> list[str]:
    """Return the accepted answers of a row; none if it has none."""
    for field in ANSWERS:
        value = row.get(field)
        values = value if isinstance(value, list) else [value]
        found = [str(v) for v in values if isinstance(v, (str, int, float)) and str(v).strip()]
        if found:
            return found
    return []


def classes(row: Row) -> list[str]:
    """Return the classes of a classification row (LongBench: all_classes)."""
    for field in ("all_classes", "choices", "classes"):
        if isinstance(row.get(field), list):
            return [str(c) for c in row[field]]
    return []


def messages(kind: str, row: Row) -> list[Message]:
    """Return what a row asks, as chat messages."""
    if kind == "conversations":
        return conversation(row)
    if kind == "mt_bench":
        text = row["turns"][0]
    elif kind == "humaneval":
        text = f"Complete this Python function:\n{row['prompt']}"
    elif kind == "gsm8k":
        text = row["question"]
    elif kind == "mbpp":
        text = row["prompt"] if _texts(row, "prompt") else row["text"]
    else:
        parts = [row[f] for f in ("context", *ASKED) if _texts(row, f)]
        text = "\n\n".join(parts)
    return [{"role": "user", "content": text}]


# what a row of a kind is as a text, field after field
WHOLE = {
    "gsm8k": ("question", "answer"),
    "humaneval": ("prompt", "canonical_solution"),
    "mbpp": ("text", "prompt", "code"),
    "conversations": (),
}


def whole_text(file: DataFile) -> str:
    """Return a file as one text: rows with all that is in them, a blank line between two."""
    if file.kind == "text":
        return file.text
    return "\n\n".join(_whole_row(file.kind, row) for row in file.rows)


def _whole_row(kind: str, row: Row) -> str:
    if kind == "conversations":
        turns = row.get("conversations") or row.get("messages") or []
        return "\n\n".join(str(t.get("value", t.get("content"))) for t in turns)
    joint = "" if kind == "humaneval" else "\n"  # a solution goes on where its prompt ends
    return joint.join(row[field] for field in WHOLE[kind] if _texts(row, field))


def fill(template: str, row: Row, where: str) -> str:
    """Put a row's fields into the {names} of a template. Raises UsageError for an unknown one."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in row:
            raise UsageError(
                f"--template: {where} has no field {cut(name)!r}; it has {cut(', '.join(row), 80)}"
            )
        return str(row[name])

    return _FIELD.sub(value, template)


def refuse_kinds(files: Sequence[DataFile], task: str, allowed: Sequence[str]) -> None:
    """Raise UsageError for a file that a task can do nothing with."""
    for file in files:
        if file.kind not in allowed:
            raise UsageError(
                f"--task {task} reads {', '.join(allowed)}; {file.name} is {file.kind}",
                "bitnest-edge eval --help lists the kinds of data",
            )


def refuse_same_names(files: Sequence[DataFile]) -> None:
    """Raise UsageError for two files of one name: their rows could not be told apart."""
    names = [f.name for f in files]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--data: two files are called {cut(name)!r}", "rename one of them")
