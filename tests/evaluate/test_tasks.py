"""Tasks against the same things done plainly."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edge_runtime.cache.policy import KV4, KV8, KvPolicy
from edge_runtime.decode.draft import NgramDraft
from edge_runtime.decode.engine import Engine
from edge_runtime.decode.sampling import Sampling
from edge_runtime.errors import CheckpointError, ContextError, UsageError
from edge_runtime.evaluate import data
from edge_runtime.evaluate.acceptance import Acceptance, SlotCounter, Way, ways
from edge_runtime.evaluate.agreement import Agreement
from edge_runtime.evaluate.build import Options, build
from edge_runtime.evaluate.items import Encoder, Item, run_items, windows
from edge_runtime.evaluate.ppl import Perplexity
from edge_runtime.evaluate.resume import Finished
from edge_runtime.evaluate.views import Views, ViewSpec, parse_view
from edge_runtime.format.reader import Checkpoint

IDS = np.random.default_rng(6).integers(0, 270, 200).tolist()
FILE = data.DataFile("t", "text", [], "", "")


@pytest.fixture(scope="module")
def encoder(tiny_checkpoint: Path) -> Encoder:
    return Encoder(Checkpoint(tiny_checkpoint))


def views_of(*names: str) -> tuple[ViewSpec, ...]:
    return tuple(parse_view(name) for name in names)


# ---- windows and perplexity


@pytest.mark.parametrize(("window", "stride"), [(50, 50), (64, 16), (64, 63), (200, 7), (32, 1)])
def test_windows_count_every_token_once(window: int, stride: int) -> None:
    cut = windows(FILE, IDS, window, stride, [])
    counted = []
    for item in cut.items:
        a = int(item.key.split("/")[1])
        assert item.ids == IDS[a : a + window]
        counted += range(a + item.first + 1, a + len(item.ids))
    first_tokens = set(range(0, 200, window)) if stride == window else {0}
    end = 200 - cut.tokens_left_out
    assert counted == [i for i in range(end) if i not in first_tokens]
    assert cut.tokens_left_out < stride


def test_windows_with_bos_and_short_texts() -> None:
    cut = windows(FILE, IDS, 51, 50, [7])
    assert [len(i.ids) for i in cut.items] == [51] * 4
    assert [(i.ids[0], i.first) for i in cut.items] == [(7, 0)] * 4  # every token is predicted
    assert windows(FILE, IDS[:10], 50, 50, []).items[0].ids == IDS[:10]
    assert windows(FILE, IDS[:1], 50, 50, []).items == []


@pytest.mark.parametrize("stride", [64, 24])
def test_perplexity_is_that_of_transformers(views: Views, tiny_source: Path, stride: int) -> None:
    """The strided loop of the transformers documentation, on its logits."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_source, dtype=torch.float32).eval()
    total, count, before = 0.0, 0, 0
    for begin in range(0, len(IDS) - 64 + 1, stride):
        end = begin + 64
        ids = torch.tensor([IDS[begin:end]])
        targets = ids.clone()
        targets[:, : -(end - before)] = -100
        with torch.inference_mode():
            logits = model(ids).logits[0, :-1, :277].double()
        kept = targets[0, 1:] != -100
        losses = -logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        total, count = total + float(losses[kept].sum()), count + int(kept.sum())
        before = end
    task = Perplexity(windows(FILE, IDS, 64, stride, []).items, views_of("fp", "nest", "w4"))
    records = run_items(task, views, Finished(None, {}), lambda *_: None)
    found = task.rows(records)
    rows = {r["view"]: r for r in found["rows"]}
    assert rows["fp"]["n"] == count
    assert rows["fp"]["value"] == pytest.approx(math.exp(total / count), rel=1e-4)
    pairs = {r["view"]: r for r in found["pairs"]}
    for name in ("nest", "w4"):
        want = rows[name]["value"] / rows["fp"]["value"]
        assert pairs[name]["value"] == pytest.approx(want, rel=1e-4)
        assert pairs[name]["over"] == "fp"


# ---- agreement


def kl(p: np.ndarray, q: np.ndarray) -> float:
    p, q = (np.exp(x.astype(np.float64) - x.max()) for x in (p, q))
    p, q = p / p.sum(), q / q.sum()
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def test_agreement(views: Views) -> None:
    names = ("w8a8", "nest", "w4", "draft:kv4")
    prompt = Item(key="p/0", workload="p", ids=IDS[:30])
    window = Item(key="t/0", workload="t", ids=IDS[50:90], first=20)
    task = Agreement([prompt, window], views_of(*names), new_tokens=16, prompts={"p"})
    assert task.context == 46
    answer = views.get(parse_view("fp")).answer(IDS[:30], new_tokens=16, sampling=Sampling())
    forced = {"p": (IDS[:30] + answer.token_ids[:-1], 29), "t": (IDS[50:89], 20)}
    for item in task.items:
        ids, first = forced[item.workload]
        record = task.run(item, views)
        assert record["n"] == len(ids) - first
        logits = {
            name: np.concatenate(list(views.get(parse_view(name)).blocks(ids, first)))
            for name in ("fp", *names)
        }
        for against, base, others in (("original", "fp", names), ("target", "nest", names[2:])):
            assert set(record[against]) == set(others)
            for name in others:
                same, divergence, _ = record[against][name]
                rows = list(zip(logits[base], logits[name], strict=True))
                assert same == sum(int(a.argmax() == b.argmax()) for a, b in rows)
                # torch's sums in other chunks: the last bits of the original differ
                assert divergence == pytest.approx(sum(kl(a, b) for a, b in rows), rel=1e-3)
    rows = task.rows({"p": [task.run(prompt, views)], "t": [task.run(window, views)]})
    assert {r["workload"] for r in rows["rows"]} == {"p", "t", "all"}
    pair = next(
        r for r in rows["pairs"]
        if (r["workload"], r["view"], r["minus"], r["metric"]) == ("all", "nest", "w8a8", "top1")
    )  # fmt: skip
    shares = {
        r["view"]: r["value"]
        for r in rows["rows"]
        if (r["workload"], r["metric"], r["against"]) == ("all", "top1", "original")
    }
    assert pair["value"] == pytest.approx(shares["nest"] - shares["w8a8"], abs=1e-5)


def test_an_original_that_says_nothing(views: Views, monkeypatch: pytest.MonkeyPatch) -> None:
    fp = views.get(parse_view("fp"))
    first = fp.answer(IDS[:30], new_tokens=1, sampling=Sampling()).token_ids
    monkeypatch.setattr(fp.engine, "eos_ids", frozenset(first))
    task = Agreement(
        [Item(key="p/0", workload="p", ids=IDS[:30])], views_of("nest"), new_tokens=4, prompts={"p"}
    )
    record = task.run(task.items[0], views)
    assert (record["n"], record["original"]["nest"]) == (0, [0, 0.0, 0.0])


def test_agreement_of_fp_alone_is_refused() -> None:
    with pytest.raises(UsageError, match="fp alone"):
        Agreement([], views_of("fp"), new_tokens=1, prompts=set())


# ---- acceptance


def next_token(engine: Engine, tokens: list[int], draft: list[int], policy: KvPolicy) -> int:
    """What the base plane says after a text that the target has read, and its own draft so far."""
    cache = engine.model.backend.new_cache(320)
    engine.model.forward("w8", tokens[:-1], 0, cache)
    found = -1
    for at, token in enumerate([tokens[-1], *draft], len(tokens) - 1):
        found = engine.model.forward("w4", [token], at, cache, policy=policy).argmax()[0]
    return found


def simulate(engine: Engine, ids: list[int], new_tokens: int, way: Way) -> dict[str, Any]:
    """Cycles in plain words, every pass anew: (drafted, accepted by slot, cycles, tokens)."""
    answer: list[int] = []

    def target(tokens: list[int]) -> int:
        cache = engine.model.backend.new_cache(320)
        return engine.model.forward("w8", tokens, 0, cache).argmax()[0]

    answer.append(target(ids))
    drafted, accepted, cycles = [0] * way.gamma, [0] * way.gamma, 0
    while len(answer) < new_tokens:
        room = min(way.gamma, new_tokens - len(answer) - 1)
        text, draft = ids + answer, list[int]()
        from_base = {"base": room, "both": (room + 1) // 2, "ngram": 0}[way.source]
        while len(draft) < from_base:
            draft.append(next_token(engine, text, draft, way.policy))
        if way.source != "base" and room:
            look_up = NgramDraft()
            look_up.propose(text, len(text) - 1, 0)
            draft += look_up.extend(text, draft, room - len(draft))
        cycles += 1
        kept = 0
        while kept < len(draft) and target(text + draft[:kept]) == draft[kept]:
            kept += 1
        answer += [*draft[:kept], target(text + draft[:kept])]
        for slot in range(len(draft)):
            drafted[slot] += 1
            accepted[slot] += slot < kept
    return {"drafted": drafted, "accepted": accepted, "cycles": cycles, "tokens": answer}


@pytest.mark.parametrize("source", ["base", "both", "ngram"])
def test_acceptance_is_that_of_a_plain_simulation(views: Views, source: Any) -> None:
    grid = ways((1, 4) if source == "both" else (3,), (source,), (KV8, KV4))
    ids = IDS[18:38]  # where look-up drafts two tokens, and one is right
    task = Acceptance(
        [Item(key="p/0", workload="p", ids=ids)],
        grid, new_tokens=10, sampling=Sampling(), ignore_eos=True,
    )  # fmt: skip
    engine = views.engine("nest")
    before = engine.draft
    record = task.run(task.items[0], views)
    assert engine.draft == before
    for way in grid:
        want, cell = simulate(engine, ids, 10, way), record[str(way)]
        assert {n: cell[n] for n in ("drafted", "accepted", "cycles")} == {
            n: want[n] for n in ("drafted", "accepted", "cycles")
        }, way
        assert (cell["emitted"], cell["differs"]) == (9, 0)
        assert sum(cell["drafted"]) > 0
    found = task.rows({"p": [record]})
    assert found["differing"] == 0
    for row in found["rows"]:
        cell = record[row["view"]]
        if row["metric"] == "tokens per cycle":
            assert row["value"] == pytest.approx(9 / cell["cycles"], rel=1e-5)
        else:
            assert row["value"] == pytest.approx(
                sum(cell["accepted"]) / sum(cell["drafted"]), rel=1e-5
            )
            assert [s["accepted"] for s in row["slots"]] == cell["accepted"]


def test_sampled_acceptance_changes_no_token(views: Views) -> None:
    task = Acceptance(
        [Item(key="p/0", workload="p", ids=IDS[:50])],
        ways((3,), ("base", "both"), (KV8,)),
        new_tokens=30,
        sampling=Sampling(temperature=0.9, seed=2),
    )
    record = task.run(task.items[0], views)
    cells = [record[str(way)] for way in ways((3,), ("base", "both"), (KV8,))]
    assert [cell["differs"] for cell in cells] == [0, 0]
    assert sum(cells[0]["accepted"]) > 0


def test_what_the_engine_does_by_itself(views: Views) -> None:
    grid = ways((2, 0), ("base",), (KV8, KV4))
    assert [str(way) for way in grid] == ["2 base kv8", "2 base kv4", "auto"]
    item = Item(key="p/0", workload="p", ids=IDS[:40] + IDS[10:30])
    task = Acceptance([item], grid, new_tokens=20, sampling=Sampling(), ignore_eos=True)
    record = task.run(item, views)
    assert (record["auto"]["differs"], record["auto"]["emitted"]) == (0, 19)
    rows = [r for r in task.rows({"p": [record]})["rows"] if r["view"] == "auto"]
    assert [r["gamma"] for r in rows] == ["auto", "auto"]


def test_the_slot_counter() -> None:
    class Three:
        def propose(self, tokens: Any, start: int, gamma: int) -> list[int]:
            return [1, 2, 3][:gamma]

    counter = SlotCounter(Three(), 3)
    counter.propose([0] * 10, 9, 3)  # two kept: the next text is three longer
    counter.propose([0] * 13, 12, 3)  # none kept
    counter.propose([0] * 14, 13, 2)  # both kept, and the answer ends
    counter.finish(4)
    assert counter.drafted == [3, 3, 2]
    assert counter.accepted == [2, 2, 0]
    assert counter.reached == [3, 2, 1]


# ---- prompts


def options(task: Any, **more: Any) -> Options:
    return Options(task=task, **({"views": views_of("nest")} | more))


def test_gsm8k_prompts(encoder: Encoder, questions: Path, jsonl: Callable[..., Path]) -> None:
    examples = data.read(jsonl([{"question": "E?", "answer": "1\n#### 1"}] * 3, "train.jsonl"))
    files = [data.read(questions)]
    built = build(options("gsm8k", num_fewshot=2, fewshot=examples), files, encoder, 320)
    text = encoder.tokenizer.decode(built.task.items[0].ids)
    assert text == (
        "Question: E?\nAnswer: 1\n#### 1\n\nQuestion: E?\nAnswer: 1\n#### 1\n\n"
        "Question: What is 2 and 2?\nAnswer:"
    )
    assert [i.key for i in built.task.items] == [f"questions/{i}" for i in range(5)]
    chat = build(options("gsm8k", num_fewshot=0, chat=True, limit=1), files, encoder, 320)
    assert len(chat.task.items) == 1
    said = encoder.tokenizer.decode(chat.task.items[0].ids, skip_special=False)
    assert said.endswith("Answer:<|im_end|>\n<|im_start|>assistant\n")
    for wrong, error in (
        ({"num_fewshot": 8}, UsageError),
        ({"num_fewshot": 8, "fewshot": examples}, CheckpointError),
        ({"num_fewshot": 1, "fewshot": files[0]}, UsageError),
    ):
        with pytest.raises(error):
            build(options("gsm8k", **wrong), files, encoder, 320)


def test_prompts_that_do_not_fit_are_left_out(encoder: Encoder, jsonl: Callable[..., Path]) -> None:
    file = data.read(jsonl([{"prompt": "hello " * n} for n in (3, 90, 4)]))
    built = build(options("agreement", new_tokens=20), [file], encoder, 64)
    assert (len(built.task.items), built.facts["skipped_too_long"]) == (2, 1)
    with pytest.raises(ContextError, match="no prompt fits"):
        build(options("agreement", new_tokens=60), [file], encoder, 64)


def test_prefixes_end_at_one_place(encoder: Encoder, text_file: Path) -> None:
    file = data.read(text_file)
    made = options(
        "acceptance", prefixes=(40, 100), gammas=(2,), sources=("base",), policies=(KV8,),
        new_tokens=10, limit=3,
    )  # fmt: skip
    built = build(made, [file], encoder, 320)
    assert [(i.workload, len(i.ids)) for i in built.task.items] == [
        *[("text 40", 40)] * 3, *[("text 100", 100)] * 3
    ]  # fmt: skip
    for short, long in zip(built.task.items[:3], built.task.items[3:], strict=True):
        assert long.ids[-40:] == short.ids
    with pytest.raises(UsageError, match="at most 105"):
        build(made, [file], encoder, 105)


def test_templates_and_answers(encoder: Encoder, jsonl: Callable[..., Path]) -> None:
    row = {"context": "A river.", "input": "What?", "answers": ["a river"]}
    file = data.read(jsonl([row]))
    made = options("jsonl", metric="f1", template="{input} of {context}", chat=False)
    built = build(made, [file], encoder, 320)
    assert encoder.tokenizer.decode(built.task.items[0].ids) == "What? of A river."
    with pytest.raises(UsageError, match="needs a metric"):
        build(options("jsonl"), [file], encoder, 320)
    with pytest.raises(CheckpointError, match="row 1: it has no answer"):
        build(options("jsonl", metric="f1"), [data.read(jsonl([{"prompt": "x"}]))], encoder, 320)
    with pytest.raises(UsageError, match="two files are called"):
        build(options("jsonl", metric="f1"), [file, file], encoder, 320)
