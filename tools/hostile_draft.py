"""What the governor costs when every draft is wrong: real steps, drafts spoiled on the way out.

    python tools/hostile_draft.py DIR [--new-tokens 128] [--prompts 10]

Cost = steps of each kind × their median time, against as many target steps of one row. The bar:
at most 1.03 × no drafting + 4 draft steps.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict

from edge_runtime.decode.draft import BaseDraft
from edge_runtime.decode.engine import Engine
from edge_runtime.decode.governor import Governor, StepTimes


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=10)
    args = parser.parse_args()
    steps: dict[tuple[str, int], list[float]] = defaultdict(list)
    add, propose = StepTimes.add, BaseDraft.propose

    def counted(self: StepTimes, view: str, rows: int, seconds: float) -> None:
        steps[view, rows].append(seconds)
        add(self, view, rows, seconds)

    def spoiled(self: BaseDraft, tokens: list[int], start: int, gamma: int) -> list[int]:
        return [(t + 1) % 1000 for t in propose(self, tokens, start, gamma)]

    StepTimes.add, BaseDraft.propose = counted, spoiled  # type: ignore[assignment, method-assign]
    with Engine.open(args.model, backend="cpu", ctx=512, draft_source="base") as engine:
        for number in range(args.prompts):
            engine.governor = Governor(StepTimes(0.55), use_ngram=False)  # knows nothing
            prompt = f"Write {number + 2} sentences about the sea."
            engine.generate(prompt, max_new_tokens=args.new_tokens, ignore_eos=True).complete()
    medians = {kind: statistics.median(values) for kind, values in steps.items()}
    cost = sum(len(values) * medians[kind] for kind, values in steps.items()) / args.prompts
    one, draft = medians["w8", 1], medians["w4", 1]
    alone = (args.new_tokens - 1) * one
    bar = 1.03 * alone + 4 * draft
    for kind, values in sorted(steps.items()):
        print(f"{kind}: {len(values) / args.prompts:.1f} steps of {medians[kind] * 1e3:.2f} ms")
    print(f"{cost / alone:.3f} of no drafting; the bar is {bar / alone:.3f}; met: {cost <= bar}")


if __name__ == "__main__":
    main()
