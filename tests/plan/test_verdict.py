"""The line that a conversion ends with: what to run, and how much faster it is."""

import msgspec
import pytest
import tiny_checkpoints

from edge_runtime.format.manifest import Agreement, Manifest, read_manifest
from edge_runtime.plan.cost import expected_tokens, step_bytes
from edge_runtime.plan.verdict import POSITION, verdict


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return read_manifest(tiny_checkpoints.convert_tiny(tmp_path_factory.mktemp("verdict")))


def judged(manifest: Manifest, *, draft: float, target: float = 0.96, plain: float = 0.96):
    agreement = Agreement(
        target_original=target,
        draft_target=draft,
        draft_original=draft,
        w8_rtn_original=plain,
        positions=1024,
    )
    found = verdict(msgspec.structs.replace(manifest, agreement=agreement))
    assert found is not None
    return found


def test_drafts_that_hit_are_recommended(manifest: Manifest) -> None:
    found = judged(manifest, draft=0.85)
    shape = manifest.spec, manifest.group_size
    w8, w4 = (step_bytes(*shape, view, POSITION) for view in ("w8", "w4"))
    cycle = found.gamma * w4 + w8
    assert found.speedup == pytest.approx(expected_tokens(0.85, found.gamma) * w8 / cycle, abs=1e-3)
    assert found.view == "nest"
    assert found.text == (
        "target 0.96 of plain 8-bit 0.96, draft 0.85: nest recommended, "
        f"expected {found.speedup:.1f}x over w8"
    )


def test_drafts_that_miss_are_not(manifest: Manifest) -> None:
    found = judged(manifest, draft=0.3)
    assert (found.view, found.gamma, found.speedup) == ("w8", 0, 1.0)
    assert "--view w8 recommended, drafts would give 1.0x" in found.text


def test_better_drafts_are_never_slower(manifest: Manifest) -> None:
    speeds = [judged(manifest, draft=a / 20).speedup for a in range(21)]
    assert speeds == sorted(speeds)


def test_a_target_that_lost_quality_is_told(manifest: Manifest) -> None:
    assert "loses quality" in judged(manifest, draft=0.85, target=0.93, plain=0.96).text
    assert "loses quality" not in judged(manifest, draft=0.85, target=0.95, plain=0.96).text


def test_weights_of_no_model_have_no_verdict(manifest: Manifest) -> None:
    assert verdict(msgspec.structs.replace(manifest, agreement=None)) is None
