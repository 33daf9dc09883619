"""Failures that take a part of the state: what is lost, what survives, and what others do there."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpsr.benchmarks.recovery.gpt import GPTTask
from cpsr.benchmarks.recovery.grid import Point, selection
from cpsr.benchmarks.recovery.lost import PART_NAMES, PartName, completed, lost_spans
from cpsr.benchmarks.recovery.measure import PointMeasurement
from cpsr.benchmarks.recovery.methods.checkfree import mean_of_neighbours
from cpsr.benchmarks.recovery.methods.scar import running_checkpoint
from cpsr.benchmarks.recovery.trainer import State, Trainer
from cpsr.benchmarks.recovery.trajectory import Trajectory
from cpsr.benchmarks.recovery.workload import Workload
from cpsr.benchmarks.tests.recovery.tiny import TINY, fault_free, one_thread
from cpsr.demo.model import GPTConfig
from cpsr.errors import ConfigError
from cpsr.fitter.end_cost import IterationWorth

SHARDS: tuple[PartName, ...] = ("1/2", "1/4", "1/8")
WORTH = IterationWorth(2e-5, 1e-6, TINY.iterations)
SMALL = Workload("small", lambda: GPTTask(GPTConfig(layers=3, heads=1, width=8, context=16)), "cosine", 1e-3, 100)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Trajectory:
    with one_thread():
        return fault_free(tmp_path_factory.mktemp("cache"), TINY.iterations)


@given(st.dictionaries(st.text("ab", min_size=1), st.integers(1, 50), min_size=1), st.sampled_from(SHARDS))
def test_shards_cut_all_elements_once_and_evenly(numels: dict[str, int], lost: PartName) -> None:
    shards = int(lost.removeprefix("1/"))
    seen = {name: torch.zeros(numel) for name, numel in numels.items()}
    sizes = []
    for draw in range(shards):
        spans = lost_spans(numels, lost, draw)
        sizes.append(sum(end - begin for begin, end in spans.values()))
        for name, (begin, end) in spans.items():
            seen[name][begin:end] += 1
    assert all(bool((values == 1).all()) for values in seen.values())
    assert max(sizes) == -(-sum(numels.values()) // shards)


def test_a_stage_is_the_middle_block() -> None:
    model = SMALL.task().model()
    spans = lost_spans({name: values.numel() for name, values in model.named_parameters()}, "stage", 0)
    assert {name.split(".")[1] for name in spans} == {"1"}
    assert len(spans) == 12
    with pytest.raises(ConfigError, match="needs a model with transformer blocks"):
        lost_spans({"weight": 3}, "stage", 0)


def test_survivors_keep_their_exact_state_and_what_was_lost_is_formed(run: Trajectory) -> None:
    point = Point(50, 0.5, 450, 488, "1/4")
    with one_thread():
        checkpoint, failure = run.at(450).state(), run.at(488).state()
        outcome = PointMeasurement(run, point, WORTH).outcome("stale")
        spans = lost_spans({name: values.numel() for name, values in failure.weights.items()}, "1/4", 9)
        state = completed(checkpoint, failure, spans)
        again = run.trainer()
        again.load(state)
        again.train_to(TINY.iterations)
        gap = float((again.final_losses() - run.final_losses()).mean())
    assert state.iteration == 488
    changed = sum(int((state.weights[name] != values).sum()) for name, values in failure.weights.items())
    assert 0 < changed <= -(-sum(values.numel() for values in failure.weights.values()) // 4)
    assert outcome.final_gap_nats == pytest.approx(gap, abs=1e-12)


@pytest.mark.parametrize("lost", SHARDS)
def test_all_methods_meet_where_little_is_lost(run: Trajectory, lost: PartName) -> None:
    """Each method forms the lost part alone: no more elements differ from the truth than were lost."""
    with one_thread():
        measurement = PointMeasurement(run, Point(50, 0.5, 450, 488, lost), WORTH)
        outcomes = {name: measurement.outcome(name) for name in ("recompute", "stale", "line", "scar", "oracle")}
    assert outcomes["recompute"].end_cost_iterations == 38
    assert outcomes["oracle"].end_cost_iterations == 0.0
    assert len({one.final_gap_nats for one in outcomes.values()}) == 4  # recompute and oracle agree


def test_the_running_checkpoint_is_made_of_recent_parts(run: Trajectory) -> None:
    point = Point(50, 0.5, 450, 488)
    with one_thread():
        saved = running_checkpoint(run, point)
        recent = {at: run.at(at).state() for at in range(350, 488, 10)}
    ages = set()
    for name, values in saved.weights.items():
        matches = [at for at, state in recent.items() if torch.equal(state.weights[name], values)]
        assert matches, f"{name} is no part of a recent state"
        ages.update(matches)
    assert max(ages) == 480
    assert len(ages) > 1
    assert saved.iteration == 488


def test_a_lost_block_is_the_mean_of_its_neighbours() -> None:
    trainer = Trainer(SMALL, SMALL.task(), 0)
    trainer.train_to(3)
    state = trainer.state()
    lost = [name for name in state.weights if name.startswith("blocks.1.")]
    formed = mean_of_neighbours(state, lost)
    assert isinstance(formed, State)
    one, two, three = (formed.weights[f"blocks.{place}.mlp.0.weight"] for place in range(3))
    share = float(((two - three) / (one - three)).median())
    assert 0 < share < 1
    torch.testing.assert_close(two, share * one + (1 - share) * three, rtol=1e-3, atol=1e-5)
    assert torch.equal(formed.weights["token.weight"], state.weights["token.weight"])
    assert mean_of_neighbours(state, ["token.weight"]) is None


def test_parts_are_named_on_the_command_line() -> None:
    assert selection(lost="1/4,all").lost == ("all", "1/4")
    with pytest.raises(ConfigError, match="no part is called '1/3'"):
        selection(lost="1/3")
    assert len(PART_NAMES) == 5


def test_a_measurement_of_a_part_is_kept_apart(run: Trajectory, tmp_path: Path) -> None:
    with one_thread():
        PointMeasurement(run, Point(50, 0.5, 400, 440, "1/2"), WORTH).outcome("stale")
        whole = PointMeasurement(run, Point(50, 0.5, 400, 440), WORTH).outcome("stale")
    names = {path.name for path in (run.directory / "points").iterdir()}
    assert {"T050-f00440", "T050-f00440-lost-1-2"} <= names
    assert whole.predicted
