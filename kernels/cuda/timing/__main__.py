"""Time the CUDA ops for sizes given by hand; the command `bench kernels` takes a model's.

    python -m edge_runtime.kernels.cuda.timing [--only linear,slice,…] [--rows 1,5] [--json FILE]

The defaults are the sizes of Llama 2 7B. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from edge_runtime.kernels.cuda.timing import text
from edge_runtime.kernels.cuda.timing.entry import ROWS, Sizes


def sizes_of(args: argparse.Namespace) -> Sizes:
    """Fused linears from the sizes of a model."""
    H, F, D = args.hidden, args.inner, args.head_dim
    return Sizes(
        linears={
            "qkv": ((args.heads + 2 * args.kv_heads) * D, H),
            "o": (H, args.heads * D),
            "gate_up": (2 * F, H),
            "down": (H, F),
            "head": (args.vocabulary, H),
        },
        hidden=H, inner=F, vocabulary=args.vocabulary, heads=args.heads, kv_heads=args.kv_heads,
        head_dim=D, group_size=args.group_size, tokens=args.tokens,
        rows=tuple(int(n) for n in args.rows.split(",")),
    )  # fmt: skip


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    sizes = {
        "hidden": 4096, "inner": 11008, "vocabulary": 32000, "heads": 32, "kv-heads": 32,
        "head-dim": 128, "group-size": 128, "tokens": 4096, "turns": 9,
    }  # fmt: skip
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--only", default="linear,attention,small,slice,prefill")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from edge_runtime.kernels.cuda.timing.report import measure

    def show(lines: list[str]) -> None:
        print(*lines, sep="\n", file=sys.stderr, flush=True)

    document = measure(
        sizes_of(args), only=args.only.split(","), turns=args.turns,
        head=lambda d: show(text.head_lines(d)), told=lambda row: show([text.line(row)]),
    )  # fmt: skip
    show(text.slice_lines(document))
    result = json.dumps(document)
    if args.json:
        args.json.write_text(result + "\n", encoding="utf-8")
    print(result)


if __name__ == "__main__":
    main()
