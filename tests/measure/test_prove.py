"""The search for the longest context, against a machine that is two numbers."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies as st

from edge_runtime.kernels.layout import KV_BLOCK
from edge_runtime.measure import prove
from edge_runtime.measure.child import Outcome


class Simulated:
    """Takes `fixed` bytes and `block` for every block of tokens; the account may be wrong."""

    def __init__(self, budget: int, fixed: int, block: int, planned: int, *, dies: bool) -> None:
        self.budget, self.fixed, self.block, self.planned = budget, fixed, block, planned
        self.dies = dies  # beyond the budget: killed before it can say what it took
        self.tried: list[int] = []

    def peak(self, context: int) -> int:
        return self.fixed + self.block * -(-context // KV_BLOCK)

    def attempt(self, context: int, enforced: bool) -> Outcome:
        self.tried.append(context)
        if enforced and context > self.planned:
            return Outcome("refused", "memory: …")
        if self.dies and self.peak(context) > self.budget:
            return Outcome("oom", "killed")
        run = {"event": "run", "way": "w8", "counted": True, "peak_bytes": self.peak(context)}
        return Outcome("ok", events=[run])

    def longest(self) -> int:
        return max(0, (self.budget - self.fixed) // self.block * KV_BLOCK)


@hypothesis.given(
    fixed=st.integers(0, 900_000),
    block=st.integers(500, 60_000),
    error=st.floats(0.5, 1.5),
    dies=st.booleans(),
)
def test_the_truth_is_found_whatever_was_planned(
    fixed: int, block: int, error: float, dies: bool
) -> None:
    budget, model = 1_000_000, 100 * KV_BLOCK
    planned = int(Simulated(budget, fixed, block, 0, dies=dies).longest() * error)
    planned = min(planned // KV_BLOCK * KV_BLOCK, model)
    machine = Simulated(budget, fixed, block, planned, dies=dies)
    proof = prove.prove(planned, model, budget, block, machine.attempt)
    truth = min(machine.longest(), model)
    assert proof.proven <= truth  # nothing is proven that does not run
    assert len(machine.tried) <= prove.MOST_TRIES + 1
    if planned >= KV_BLOCK and truth >= KV_BLOCK:
        missed = (truth - proof.proven) // KV_BLOCK * block
        assert missed <= max(budget * prove.CLOSE_ENOUGH, 0) + block
    if planned + KV_BLOCK <= model:
        assert proof.beyond == "refused"
    assert proof.difference_bytes == abs(planned - proof.proven) // KV_BLOCK * block


def test_a_model_that_ends_before_memory_does() -> None:
    machine = Simulated(10**9, 0, 1000, 640, dies=False)
    proof = prove.prove(640, 640, 10**9, 1000, machine.attempt)
    assert (proof.proven, proof.limited_by, proof.beyond) == (640, "model", "")
    assert machine.tried == [640]


def test_one_death_with_much_memory_left_is_not_the_end() -> None:
    machine = Simulated(10**9, 0, 1000, 640, dies=True)
    attempt, deaths = machine.attempt, iter([True])

    def unlucky(context: int, enforced: bool) -> Outcome:
        return Outcome("oom", "killed") if next(deaths, False) else attempt(context, enforced)

    proof = prove.prove(640, 640, 10**9, 1000, unlucky)
    assert proof.proven >= 320


def test_nothing_runs() -> None:
    machine = Simulated(1000, 5000, 10, 128, dies=True)
    proof = prove.prove(128, 6400, 1000, 10, machine.attempt)
    assert proof.proven == 0
    assert {one.status for one in proof.tries} == {"oom"}
