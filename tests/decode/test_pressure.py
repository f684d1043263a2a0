"""Memory that others take: what runs is finished with the same tokens, new work is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_runtime import machine
from edge_runtime.decode import pressure
from edge_runtime.decode.engine import Engine
from edge_runtime.decode.pressure import MemoryPressure, MemoryWatch

MIB = 1 << 20
PROMPT = [(7 * i) % 90 + 1 for i in range(150)]


class Machine:
    """A /proc whose memory a test sets."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "proc/pressure").mkdir(parents=True)
        self.set(1000)

    def set(self, available_mib: int, *, full: float | None = None) -> None:
        (self.root / "proc/meminfo").write_text(
            f"MemTotal:  {4000 * 1024} kB\nMemFree:  99 kB\n"
            f"MemAvailable:  {available_mib << 10} kB\n"
        )
        if full is not None:
            (self.root / "proc/pressure/memory").write_text(
                f"some avg10=90.00 avg60=0 avg300=0 total=5\n"
                f"full avg10={full:.2f} avg60=0 total=3\n"
            )


@pytest.fixture
def fake(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_available_is_not_free_and_respects_control_groups(fake: Machine) -> None:
    assert machine.available_bytes(fake.root) == 1000 * MIB
    assert machine.total_bytes(fake.root) == 4000 * MIB
    group = fake.root / "sys/fs/cgroup/jobs/mine"
    group.mkdir(parents=True)
    (fake.root / "proc/self").mkdir()
    (fake.root / "proc/self/cgroup").write_text("0::/jobs/mine\n")
    for folder, limit, used, files in ((group, "max", 1, 0), (group.parent, 500, 300, 100)):
        text = limit if isinstance(limit, str) else str(limit * MIB)
        (folder / "memory.max").write_text(text)
        (folder / "memory.current").write_text(str(used * MIB))
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {files * MIB}\n")
    assert machine.available_bytes(fake.root) == 300 * MIB  # 500 - (300 - 100)
    assert machine.total_bytes(fake.root) == 500 * MIB


def test_control_groups_of_version_1(fake: Machine) -> None:
    (fake.root / "proc/self").mkdir()
    (fake.root / "proc/self/cgroup").write_text("5:cpu:/x\n4:memory:/a\n0::/\n")
    group = fake.root / "sys/fs/cgroup/memory/a"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(str(800 * MIB))
    (group / "memory.usage_in_bytes").write_text(str(700 * MIB))
    (group / "memory.stat").write_text(f"inactive_file 0\ntotal_inactive_file {50 * MIB}\n")
    assert machine.available_bytes(fake.root) == 150 * MIB


def test_what_cannot_be_read_is_unknown_and_no_reason(tmp_path: Path) -> None:
    assert machine.available_bytes(tmp_path) is None
    assert machine.stalled_percent(tmp_path) is None
    assert MemoryWatch(50 * MIB, tmp_path).look() == ""


def test_low_by_reserve_or_by_stalls(fake: Machine) -> None:
    watch = MemoryWatch(500 * MIB, fake.root)
    assert not watch.look()
    fake.set(499)
    assert "499 MiB are available and 500 MiB are to stay free" in watch.look()
    fake.set(600, full=9.9)
    assert not watch.look()
    fake.set(600, full=25.0)
    assert "25 %" in watch.look()


def test_little_is_kept_free_even_without_a_reserve(fake: Machine) -> None:
    assert MemoryWatch(0, fake.root).reserve_bytes == 64 * MIB
    assert MemoryWatch(100 * MIB, fake.root).reserve_bytes == 100 * MIB


def test_looking_is_rare(fake: Machine) -> None:
    watch = MemoryWatch(0, fake.root)
    for _ in range(1000):
        watch.due()
    assert watch.looks <= 2


def test_new_work_is_refused_and_taken_again(engines: Callable[..., Engine], fake: Machine) -> None:
    engine = engines()
    engine.watch = MemoryWatch(500 * MIB, fake.root)
    want = engine.generate(PROMPT, max_new_tokens=8, ignore_eos=True).complete().token_ids
    fake.set(100)
    with pytest.raises(MemoryPressure, match="100 MiB are available") as refused:
        engine.generate(PROMPT, max_new_tokens=8)
    assert refused.value.exit_code == 3
    fake.set(1000)
    again = engine.generate(PROMPT, max_new_tokens=8, ignore_eos=True).complete()
    assert again.token_ids == want
    assert again.cached_tokens == 0  # given back


@pytest.mark.parametrize("chunk", [7, 64])
def test_memory_lost_while_running_changes_no_token(
    engines: Callable[..., Engine], fake: Machine, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(pressure, "LOOK_EVERY_S", 0.0)  # at every chance
    engine = engines(gamma=4, chunk=chunk)
    engine.watch = MemoryWatch(500 * MIB, fake.root)
    want = engine.generate(PROMPT, max_new_tokens=40, ignore_eos=True).complete().token_ids
    engine.reuse([0])
    relieved: list[int | None] = []
    relieve = engine.relieve

    def counted(kept: int | None = None) -> int:
        relieved.append(kept)
        return relieve(kept)

    monkeypatch.setattr(engine, "relieve", counted)
    running = engine.generate(PROMPT, max_new_tokens=40, ignore_eos=True)
    fake.set(10)  # before the prompt is read
    assert running.complete().token_ids == want
    assert len(relieved) > 3


HOG = """
import sys
blocks = []
for line in sys.stdin:
    blocks.append(bytearray(int(line)))
    blocks[-1][::4096] = b"x" * len(blocks[-1][::4096])
    print("full", flush=True)
"""


def take_memory(hog: subprocess.Popen[str], until_bytes: int) -> None:
    """Let the hog grow until so little is left; skip where what is left does not follow."""
    assert hog.stdin is not None
    assert hog.stdout is not None
    for _ in range(20):
        if (machine.available_bytes() or 0) < until_bytes:
            return
        hog.stdin.write(f"{100 * MIB}\n")
        hog.stdin.flush()
        hog.stdout.readline()
    # seen in a virtual machine whose host gives memory back on demand: 2 GB taken, none missing;
    # the tests with a machine of our own above show the same behaviour everywhere
    pytest.skip("the kernel's count of free memory does not follow what a process takes here")


def test_a_real_hog(checkpoints: Callable[[str], Path]) -> None:
    available = machine.available_bytes()
    # the hog takes up to 2 GB: on a smaller machine it would endanger what else runs there
    if available is None or available < 3000 * MIB:
        pytest.skip(f"needs 3 GiB of free memory, {available} bytes are free")
    with Engine.open(checkpoints("llama"), ctx=320) as engine:
        want = engine.generate(PROMPT, max_new_tokens=100, ignore_eos=True).complete().token_ids
        engine.reuse([0])
        reserve = (machine.available_bytes() or 0) - 200 * MIB
        engine.watch = MemoryWatch(reserve)
        running = engine.generate(PROMPT, max_new_tokens=100, ignore_eos=True)
        tokens = [next(running).id for _ in range(10)]
        with subprocess.Popen(
            [sys.executable, "-c", HOG], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as hog:
            try:
                take_memory(hog, reserve - 300 * MIB)
                tokens += [token.id for token in running]
                assert tokens == want
                with pytest.raises(MemoryPressure):
                    engine.generate(PROMPT)
            finally:
                hog.kill()
