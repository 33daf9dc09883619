"""The arithmetic of stalls, other packages, and that a tiny run leaves everything behind."""

import json
from pathlib import Path

import pytest

from cpsr.benchmarks.stall import trial
from cpsr.benchmarks.stall.job import Size
from cpsr.benchmarks.stall.measure import Block, SizeSamples, Steps
from cpsr.benchmarks.stall.result import SizeResult, summarise
from cpsr.benchmarks.stall.rivals import ROSTER, Entry, installed
from cpsr.benchmarks.stall.run import main
from cpsr.benchmarks.stall.trial import Trial, try_method
from cpsr.benchmarks.tests.recovery.tiny import called_here
from tests.device import DEVICE

MIB = 2**20
TINY = Size("tiny", width=32, layers=1, batch=8, device=DEVICE)
BY_NAME = {entry.name: entry for entry in ROSTER}
RIVALS = [entry for entry in ROSTER if entry.modules]
VERIFYING = "lm-resiliency, checked"
METHODS = ("cpsr", "dcp, reused buffers", "torch.save + fsync")


def result(*, ours: float, dcp: float, checked: float | None = None) -> SizeResult:
    """Steps of 1 s at first, 3 s at last; a pair takes `ours`, `dcp` longer, `checked` by a package that verifies."""
    first, last = Steps([1.0, 1.0], 4.0), Steps([3.0, 3.0], 12.0)
    blocks = [
        Block("dcp async_save", first, Steps([1.0 + dcp, 1.0], 4.0), 0.5),
        # Its neighbours are 1, 1 (before) and 3, 3 (after): a step without a checkpoint takes 2 s here.
        Block("cpsr", first, Steps([2.0, 2.0 + ours, 2.25], 13.5), 4.0),
    ]
    if checked is not None:
        blocks.append(Block(VERIFYING, last, Steps([3.0 + checked, 3.0], 12.0), 0.5))
    samples = SizeSamples(100, blocks, after=last, memcpy_seconds=[0.1])
    trials = {name: Trial(BY_NAME[name], None, {"tiny": 300}) for name in ("cpsr", "dcp async_save", VERIFYING)}
    return summarise("tiny", samples, trials)


def test_the_stall_is_the_pair_less_its_neighbours_on_both_sides() -> None:
    ours, dcp = result(ours=0.6, dcp=0.8).methods
    assert (ours.name, dcp.name) == ("cpsr", "dcp async_save")
    assert ours.stalls == pytest.approx([0.6])
    assert ours.ratio.value == pytest.approx(0.6 / 0.1)
    assert ours.until_durable.value == pytest.approx(0.6 + 0.25)  # the third step belongs to it too
    assert ours.processor.value == pytest.approx(13.5 - 3 * 4.0)
    assert ours.durable_seconds.value == 4.0
    assert dcp.stall.value == pytest.approx(0.8)


def test_an_aim_is_met_or_missed() -> None:
    assert list(result(ours=0.2, dcp=0.8, checked=0.7).aims().values()) == [True, True, True]
    assert list(result(ours=0.7, dcp=0.6, checked=0.8).aims().values()) == [False, False, True]  # DCP does not verify
    assert list(result(ours=0.2, dcp=0.8).aims().values()) == [True, True]  # nothing to compare with: no third aim


@pytest.mark.slow
@pytest.mark.parametrize("entry", RIVALS, ids=lambda entry: entry.name)
def test_another_package_saves_and_leaves_nothing_behind(entry: Entry, tmp_path: Path) -> None:
    if not installed(entry):
        pytest.skip(f"{entry.name} is not installed (extra `bench`)")
    shared = set(Path("/dev/shm").iterdir())
    found = try_method(entry, [TINY], tmp_path)
    assert found.error is None
    assert not list(tmp_path.iterdir())
    assert not {path for path in set(Path("/dev/shm").iterdir()) - shared if "cpsr-bench" in path.name}


def test_a_tiny_run_leaves_figures_and_cleans_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "in_own_process", called_here)
    monkeypatch.setattr(trial, "SAMPLE_SECONDS", 1.0)  # each sample looks at every process of the machine
    path, workdir = tmp_path / "out" / "stall.json", tmp_path / "work"
    roster = [
        *(BY_NAME[name] for name in METHODS),
        Entry("missing", BY_NAME["dlrover"].open, ("no_such_package",)),
        Entry("broken", divmod),  # cannot be opened
    ]
    main(path, pairs=2, workdir=workdir, sizes=[TINY], roster=roster, device=DEVICE)
    report = json.loads(path.read_text())
    assert report["machine"]["device"]["kind"] == report["jobs"][0]["device"] == DEVICE
    (found,) = report["results"]
    assert [method["name"] for method in found["methods"]] == sorted(METHODS)
    assert all(method["host_memory_bytes"] < 100 * MIB for method in found["methods"])
    assert all(len(method["stalls"]) == 2 and method["durable_seconds"]["value"] > 0 for method in found["methods"])
    assert found["state_bytes"] == 3 * 4 * (2 * 256 * 32 + 256 + 32 * 32 + 32)
    assert not list(workdir.iterdir())
    printed = capsys.readouterr().out
    assert printed.count("pass ") + printed.count("miss ") == 2  # no other package that verifies was timed
    assert report["left_out"] == ["missing"]
    assert report["not_run"]["broken"].startswith("broken: TypeError")
