"""The arithmetic of stalls, how damage and memory are reported, and that a tiny run leaves everything behind."""

import json
import mmap
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cpsr.benchmarks.stall.job import Size
from cpsr.benchmarks.stall.measure import Block, SizeSamples
from cpsr.benchmarks.stall.result import SizeResult
from cpsr.benchmarks.stall.result import summarise as summarise_trials
from cpsr.benchmarks.stall.rivals import ROSTER, Entry, installed
from cpsr.benchmarks.stall.run import main
from cpsr.benchmarks.stall.trial import Answer, Case, FamilyPeak, Trial, damage_cases, family_bytes, try_method
from tests.device import DEVICE

MIB = 2**20
TINY = Size("tiny", width=32, layers=1, batch=8, device=DEVICE)
BY_NAME = {entry.name: entry for entry in ROSTER}
RIVALS = [entry for entry in ROSTER if entry.modules]
METHODS = ("cpsr", "dcp, reused buffers")
VERIFIED = [Case("one flipped byte", "a", Answer.VERIFIED), Case("truncated file", "a", Answer.ERROR)]


def trial(name: str, cases: list[Case] = VERIFIED) -> Trial:
    return Trial(name, cases=cases, host_memory_bytes={"tiny": 300})


def summarise(size: str, samples: SizeSamples) -> SizeResult:
    return summarise_trials(size, samples, {"cpsr": trial("cpsr"), "dcp async_save": trial("dcp async_save")})


def samples(*, ours: float, dcp: float) -> SizeSamples:
    """Steps of 1 s at first and 3 s at the end; CPSR's pair takes `ours` longer, DCP's `dcp`."""
    blocks = [
        Block("dcp async_save", 0, [1.0, 1.0], [1.0 + dcp, 1.0], 0.5),
        # Its neighbours are 1, 1 (before) and 3, 3 (after): a step without a checkpoint takes 2 s here.
        Block("cpsr", 0, [1.0, 1.0], [2.0, 2.0 + ours, 2.25], 4.0),
    ]
    return SizeSamples(100, blocks, after_seconds=[3.0, 3.0], memcpy_seconds=[0.5])


def test_the_stall_is_the_pair_less_its_neighbours_on_both_sides() -> None:
    ours, dcp = summarise("tiny", samples(ours=0.6, dcp=0.8)).methods
    assert (ours.name, dcp.name) == ("cpsr", "dcp async_save")
    assert ours.stalls == pytest.approx([0.6])
    assert ours.ratio.value == pytest.approx(0.6 / 0.5)
    assert ours.until_durable.value == pytest.approx(0.6 + 0.25)  # the third step belongs to it too
    assert ours.durable_seconds.value == 4.0
    assert dcp.stall.value == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("ours", "dcp", "expected"),
    [
        (0.5, 0.8, [True, True, True]),
        (0.7, 0.8, [False, True, True]),
        (0.6, 0.5, [True, False, False]),
        (0.9, 0.8, [False, False, False]),
    ],
)
def test_an_aim_is_met_or_missed(ours: float, dcp: float, expected: list[bool]) -> None:
    aims = summarise("tiny", samples(ours=ours, dcp=dcp)).aims()
    assert list(aims) == ["tiny: at most 1.2 x memcpy", "tiny: below DCP", "tiny: the shortest of all that verify"]
    assert list(aims.values()) == expected


def test_a_method_that_lets_damage_pass_is_not_among_those_that_verify() -> None:
    careless = [*VERIFIED, Case("one flipped byte", "b", Answer.SILENTLY_WRONG)]
    trials = {"cpsr": trial("cpsr"), "dcp async_save": trial("dcp async_save", careless)}
    faster = summarise_trials("tiny", samples(ours=0.5, dcp=0.4), trials)
    assert list(faster.aims().values()) == [True, False, True]
    assert [method.verifies for method in faster.methods] == [True, False]


def test_answers_are_counted_by_file_the_worst_first() -> None:
    cases = [Case("one flipped byte", name, answer) for name, answer in zip("abc", reversed(Answer), strict=False)]
    cases += [Case("one flipped byte", "d", Answer.ERROR), Case("truncated file", "a", Answer.NOTHING)]
    assert list(trial("x", cases).answers("one flipped byte").items()) == [
        (Answer.ERROR, 2),
        (Answer.VERIFIED, 1),
        (Answer.UNHARMED, 1),
    ]


def test_cpsr_gives_back_the_checkpoint_before_a_damaged_one(tmp_path: Path) -> None:
    cases = damage_cases(BY_NAME["cpsr"], TINY, tmp_path)
    assert {case.answer for case in cases} == {Answer.VERIFIED}
    assert len(cases) % 2 == 0
    names = {Path(case.file).name for case in cases}
    assert {"COMMIT", "manifest.json", "rank-00000.params.safetensors", "rank-00000.moments.safetensors"} <= names


def test_torch_save_gives_back_a_flipped_byte_and_refuses_half_a_file(tmp_path: Path) -> None:
    flipped, truncated = damage_cases(BY_NAME["torch.save + fsync"], TINY, tmp_path)
    assert (flipped.damage, flipped.answer) == ("one flipped byte", Answer.SILENTLY_WRONG)
    assert (truncated.damage, truncated.answer) == ("truncated file", Answer.ERROR)
    assert truncated.detail


@pytest.mark.parametrize("entry", RIVALS, ids=lambda entry: entry.name)
def test_another_package_saves_gives_back_and_leaves_nothing_behind(entry: Entry, tmp_path: Path) -> None:
    if not installed(entry):
        pytest.skip(f"{entry.name} is not installed (extra `bench`)")
    shared = set(Path("/dev/shm").iterdir())
    found = try_method(entry, [TINY], tmp_path)
    assert found.error is None
    assert found.cases
    assert found.verifies == (entry.name == "lm-resiliency, checked")
    assert not list(tmp_path.iterdir())
    assert not {path for path in set(Path("/dev/shm").iterdir()) - shared if "cpsr-bench" in path.name}


def test_memory_of_children_counts_and_shared_memory_counts_once() -> None:
    before = family_bytes()
    hold = "import sys; kept = bytearray(b'x') * (64 * 2**20); print(flush=True); sys.stdin.read()"
    with FamilyPeak() as memory:
        with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            assert family_bytes() - before > 60 * MIB
            deadline = time.monotonic() + 10  # a busy machine may take no sample while the child is there
            while memory.peak_bytes - before <= 60 * MIB and time.monotonic() < deadline:
                time.sleep(0.01)
        assert family_bytes() - before < 30 * MIB
    assert memory.peak_bytes - before > 60 * MIB
    with mmap.mmap(-1, 64 * MIB) as shared:
        shared.write(b"x" * (64 * MIB))
        assert 60 * MIB < family_bytes() - before < 90 * MIB


@pytest.mark.slow
def test_a_tiny_run_leaves_figures_and_a_plot_and_cleans_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, workdir = tmp_path / "out" / "stall.json", tmp_path / "work"
    roster = [
        *(BY_NAME[name] for name in METHODS),
        Entry("missing", BY_NAME["dlrover"].open, ("no_such_package",)),
        Entry("broken", divmod),  # cannot be opened
    ]
    main(path, pairs=2, workdir=workdir, sizes=[TINY], roster=roster, device=DEVICE)
    report = json.loads(path.read_text())
    assert report["machine"]["torch_threads"] > 0
    assert report["machine"]["cores"] > 0
    assert report["machine"]["device"]["kind"] == report["jobs"][0]["device"] == DEVICE
    assert {"date", "cpu_model", "versions", "file_system"} <= report["machine"].keys()
    (result,) = report["results"]
    assert [method["name"] for method in result["methods"]] == sorted(METHODS)
    assert all(method["host_memory_bytes"] < 100 * MIB for method in result["methods"])
    assert all(len(method["stalls"]) == 2 and method["durable_seconds"]["value"] > 0 for method in result["methods"])
    assert result["state_bytes"] == 3 * 4 * (2 * 256 * 32 + 256 + 32 * 32 + 32)
    assert not list(workdir.iterdir())
    printed = capsys.readouterr().out
    assert "torch threads" in printed
    assert printed.count("pass ") + printed.count("miss ") == 3
    assert report["left_out"] == ["missing"]
    assert "Left out, not installed: missing" in printed
    *tried, broken = report["trials"]
    assert [found["name"] for found in tried] == list(METHODS)
    assert all(found["cases"] and found["error"] is None for found in tried)
    assert broken["error"].startswith("broken: TypeError")
    assert "broken could not be run: broken: TypeError" in printed.replace("\n", " ")
