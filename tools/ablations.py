"""The papers' ablations on a model of yours, as Markdown tables with the papers' figures beside.

    python tools/ablations.py DIR --original SRC --data ../shared/data --out FOLDER
        [--only weights,kv,gamma,policy,memory] [--limit N] [--paper-shape llama-2-7b-32k]

Each is one or two `bitnest-edge` commands; their documents and finished items are kept in --out, so
that a run that was stopped goes on. The papers' figures are those that stand in the text of BitNest
(arXiv 2610.02800): other models on other machines, for the direction of an effect and never for its
size.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-c", "from edge_runtime.cli import main; main()"]
CHATS = "--data {data}/gsm8k_test.jsonl --data {data}/mt_bench_question.jsonl"


@dataclass(frozen=True)
class Ours:
    """A row of a document of `eval`: found by the fields that it must have."""

    view: str
    metric: str
    against: str | None = None
    workload: str | None = None


@dataclass(frozen=True)
class Ablation:
    """Commands, and the lines of a table: cells are texts or rows of the commands' documents."""

    title: str
    commands: tuple[str, ...]
    head: tuple[str, ...]
    lines: tuple[tuple[str | Ours, ...], ...]
    differs: str


def _weights(label: str, view: str, *paper: str) -> tuple[str | Ours, ...]:
    ppl, top1 = Ours(view, "perplexity"), Ours(view, "top1", "original", "all")
    agreement: str | Ours = top1 if view != "fp" else "1"
    return label, ppl, agreement, *paper


def _policy(policy: str) -> tuple[str | Ours, ...]:
    found = [
        Ours(f"4 base {policy}", "acceptance", workload=f"wikitext2_test.raw {n}")
        for n in (512, 2048, 4096, 7936)
    ]
    paper = {"kv8": "0.944 at 32K, 28.5 tok/s", "kv4": "0.875 at 32K, 34.3 tok/s"}
    return policy, *found, paper.get(policy, "")


ABLATIONS = {
    "weights": Ablation(
        "Precision of the target's weights (tables 5b and 12)",
        (
            "eval {model} --task ppl --data {data}/wikitext2_test.raw.txt --limit {limit} "
            "--views fp,w8a8,nest,w4,w4a16 --original {original}",
            f"eval {{model}} --task agreement {CHATS} --limit {{limit}} "
            "--views w8a8,nest,w4,w4a16 --original {original}",
        ),
        ("target", "WikiText-2 perplexity", "first choice = original",
         "paper: GSM8K %, LLaMA-3-8B", "Qwen2.5-7B"),
        (
            _weights("original, 16 bits or more", "fp", "", ""),
            _weights("W8A8, rounded to nearest", "w8a8", "50.0", "83.2"),
            _weights("nest (W8A8)", "nest", "49.8", "82.0"),
            _weights("W4A16", "w4a16", "41.8", ""),
            _weights("W4A8, the base alone", "w4", "41.4", "79.3"),
        ),
        "Perplexity and agreement in place of GSM8K, where a small model has little to lose; W4A16 "
        "is our nested base, not a W4 of its own. The paper's 8-bit target is W8A8 too.",
    ),
    "kv": Ablation(
        "Precision of the KV cache, of target and of draft (tables 5a and 11)",
        (
            "eval {model} --task ppl --data {data}/wikitext2_test.raw.txt --limit {limit} "
            "--views nest,nest:kv4",
            f"eval {{model}} --task agreement {CHATS} --limit {{limit}} "
            "--views nest,nest:kv4,draft,draft:kv4 --original {original}",
            f"eval {{model}} --task acceptance {CHATS} --limit {{limit}} --gamma 4 "
            "--draft-source base --kv-policy kv8,kv4",
        ),
        ("target's cache, draft's cache", "WikiText-2 perplexity", "first choice",
         "acceptance, draft 4", "paper: GSM8K %, Qwen2.5-7B"),
        (
            ("KV8, none", Ours("nest", "perplexity"), Ours("nest", "top1", "original", "all"),
             "", "82.4"),
            ("KV4, none", Ours("nest:kv4", "perplexity"),
             Ours("nest:kv4", "top1", "original", "all"), "", "80.2"),
            ("KV8, KV8", "as KV8, none", Ours("draft", "top1", "target", "all"),
             Ours("4 base kv8", "acceptance", workload="all"), ""),
            ("KV8, KV4", "as KV8, none", Ours("draft:kv4", "top1", "target", "all"),
             Ours("4 base kv4", "acceptance", workload="all"), "81.6; acceptance 0.933"),
            ("KV4, KV4", "not built: verification reads all", "", "", "78.4"),
        ),
        "First choices: the target's with the original's, the draft's with the target's. The "
        "paper's drafts change its GSM8K a little; here drafting changes no token.",
    ),
    "gamma": Ablation(
        "Draft length (table 9)",
        (
            "eval {model} --task acceptance --data {data}/wikitext2_test.raw.txt --limit {limit} "
            "--prefix 2048 --gamma 1,2,3,4,5,6,7 --draft-source base --kv-policy kv4",
        ),
        ("draft length", "acceptance", "tokens a cycle", "paper"),
        tuple(
            (str(g), Ours(f"{g} base kv4", "acceptance"), Ours(f"{g} base kv4", "tokens per cycle"),
             "fastest at 4K and at 31K" if g == 4 else "")
            for g in range(1, 8)
        ),
        "The paper has tok/s of LLaMA-2-7B-32K on an A6000; speed here: `bitnest-edge profile DIR "
        "--gamma 1,2,3,4,5,6,7`.",
    ),
    "policy": Ablation(
        "What drafting reads of the cache, against the context (figure 5a and table 10)",
        (
            "eval {model} --task acceptance --data {data}/wikitext2_test.raw.txt --limit {limit} "
            "--prefix 512,2048,4096,7936 --gamma 4 --draft-source base "
            "--kv-policy kv8,kv4,recent:64,recent:256,recent:1024",
        ),
        ("policy", "512 tokens", "2,048", "4,096", "7,936", "paper: LLaMA-2-7B-32K"),
        tuple(map(_policy, ("kv8", "kv4", "recent:64", "recent:256", "recent:1024"))),
        "Acceptance of base drafts of 4; the paper's is of a model with 32 KV heads at 32K.",
    ),
}  # fmt: skip


def run(arguments: str, stem: Path) -> dict[str, Any]:
    """Run a command and keep its document; an `eval` goes on where it stopped."""
    words = [*arguments.split("\0"), "--json"]
    if words[0] == "eval":
        words += ["--resume", str(stem.with_suffix(".items"))]
    done = subprocess.run([*COMMAND, *words], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)  # it has said why
    document = done.stdout.splitlines()[-1]
    stem.with_suffix(".json").write_text(document)
    found: dict[str, Any] = json.loads(document)
    return found


def filled(command: str, values: dict[str, str]) -> str:
    """Return the words of a command, apart by zero bytes: paths may have spaces."""
    return "\0".join(word.format(**values) for word in command.split())


def shown(command: str, values: dict[str, str]) -> str:
    """Return a command as a reader would type it, places left out."""
    places = {"model": "DIR", "original": "SRC", "data": "DATA"}
    return "    bitnest-edge " + " ".join(command.format(**values | places).split())


def cell(what: str | Ours, rows: Sequence[dict[str, Any]]) -> str:
    """Return a text, or a row's value with its interval and count."""
    if isinstance(what, str):
        return what
    for row in rows:
        if (
            row["value"] is not None
            and (row["view"], row["metric"]) == (what.view, what.metric)
            and row.get("against") == what.against
            and what.workload in (None, row["workload"])
        ):
            interval = ""
            if row["ci95"] is not None:
                interval = "{:.4g} to {:.4g}; ".format(*row["ci95"])
            return f"{row['value']:.4g} ({interval}n {row['n']})"
    return "not measured"


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))


def ablation(name: str, values: dict[str, str], out: Path) -> str:
    """Run the commands of one and return its section."""
    what = ABLATIONS[name]
    rows: list[dict[str, Any]] = []
    for number, command in enumerate(what.commands):
        rows += run(filled(command, values), out / f"{name}-{number}")["rows"]
    lines = [[cell(c, rows) for c in line] for line in what.lines]
    commands = "\n".join(shown(command, values) for command in what.commands)
    return f"## {what.title}\n\n{table(what.head, lines)}\n\n{what.differs}\n\n{commands}\n"


def memory(values: dict[str, str], out: Path) -> str:
    """What the planner says of the paper's board, beside what the paper measured (table 14)."""
    command = "plan {shape} --device orin-nx-16gb"
    plan = run(filled(command, values), out / "memory")
    claims = plan["published"]["claims"]
    lines = []
    for layout in ("fp16", "w8", "two_copies", "nest"):
        weights = plan["layouts"][layout]["weights_bytes"] / 2**30
        lines.append(
            [
                layout,
                f"{weights:.2f}",
                str(claims["weights_gib"].get(layout, "")),
                str(plan["max_context"][layout]),
                str(claims["max_context"].get(layout, "")),
            ]
        )
    head = ("layout", "weights, GiB", "paper", "longest context, tokens", "paper")
    differs = (
        "Ours is a plan of the whole board, reserve included; fp16 and w8 keep a 16-bit cache. The "
        "paper's contexts are those that ran, in steps of 2K."
    )
    title = "## Memory and the longest context on Orin NX 16 GB (tables 3 and 14)"
    return f"{title}\n\n{table(head, lines)}\n\n{differs}\n\n{shown(command, values)}\n"


def main() -> int:
    """Parse the command line, run what is asked for, write tables.md."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [*ABLATIONS, "memory"]
    parser.add_argument("model", help="a converted model")
    parser.add_argument("--original", required=True, help="what it was converted from")
    parser.add_argument("--data", type=Path, required=True, help="folder of the evaluation's files")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for documents and tables.md"
    )
    parser.add_argument("--only", default=",".join(names), help="some of %(default)s")
    parser.add_argument("--limit", type=int, default=8, help="rows, windows or prefixes of a file")
    parser.add_argument("--paper-shape", default="llama-2-7b-32k", help="for the memory's table")
    args = parser.parse_args()
    if unknown := set(args.only.split(",")) - set(names):
        parser.error(f"--only: expected some of {', '.join(names)}, got {sorted(unknown)[0]!r}")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {args.out}: {error.strerror}")
    values = {"model": args.model, "original": args.original, "data": str(args.data)}
    values |= {"limit": str(args.limit), "shape": args.paper_shape}
    sections = [
        memory(values, args.out) if name == "memory" else ablation(name, values, args.out)
        for name in args.only.split(",")
    ]
    text = "\n".join(sections)
    (args.out / "tables.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
