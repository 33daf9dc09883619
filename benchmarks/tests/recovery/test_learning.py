"""Predictors that learn along the run: every checkpoint once, in order, and none after the failure."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from cpsr.benchmarks.harness.files import read_tree
from cpsr.benchmarks.recovery.grid import Point
from cpsr.benchmarks.recovery.learning import learned
from cpsr.benchmarks.recovery.measure import PointMeasurement
from cpsr.benchmarks.recovery.methods import roster as methods
from cpsr.benchmarks.recovery.methods.roster import Method, sees_the_run
from cpsr.benchmarks.recovery.trajectory import Trajectory
from cpsr.benchmarks.tests.recovery.tiny import TINY, fault_free, one_thread
from cpsr.errors import CPSRError
from cpsr.fitter.end_cost import IterationWorth
from cpsr.predictor.line import LinePredictor
from cpsr.predictor.protocol import Forecast, History, Target
from cpsr.state.codec import encode

POINT = Point(interval=50, fraction=0.5, checkpoint=450, failure=488)
WORTH = IterationWorth(2e-5, 1e-6, TINY.iterations)


class Watcher(LinePredictor):
    """Learns which checkpoints it was shown, and the newest weights' sum in two slices."""

    name = "watcher"
    slices: ClassVar[list[int]] = []

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.seen: list[int] = []
        self.total = torch.zeros(())

    def learn(self, history: History) -> Iterator[None]:
        newest = history.entries[-1].iteration
        total = torch.zeros(())
        for operator in history.operators:
            total = total + history.read(operator, len(history.entries) - 1, 0, history.numel(operator)).sum()
            self.slices.append(newest)
            yield
        self.seen.append(newest)
        self.total = total

    def forecast(self, history: History, target: Target) -> Forecast:
        forecast = super().forecast(history, target)
        forecast.settings["seen"] = list(self.seen)
        return forecast

    def accuracy(self) -> list[dict[str, Any]]:
        return [{"iteration": at, "line_cosine": 0.5, "vitp_cosine": 1 - 50 / at} for at in self.seen]

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"seen": self.seen, "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.seen, self.total = list(state["seen"]), state["total"]


@pytest.fixture(autouse=True)
def _setting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(methods.PREDICTORS, "watcher", Method(Watcher))
    monkeypatch.setattr(Watcher, "slices", [])
    with one_thread():
        yield


@pytest.fixture
def run(tmp_path: Path) -> Trajectory:
    return fault_free(tmp_path, 500)


def test_a_method_has_seen_every_checkpoint_in_order_and_none_later(tmp_path: Path) -> None:
    run = fault_free(tmp_path, TINY.iterations)
    outcome = PointMeasurement(run, POINT, WORTH).outcome("watcher")
    assert outcome.settings is not None
    assert outcome.settings["seen"] == list(range(50, 451, 50))
    assert outcome.accuracy is not None
    assert [score["iteration"] for score in outcome.accuracy] == list(range(50, 451, 50))
    assert outcome.learning_seconds is not None
    assert outcome.learning_seconds > 0
    assert outcome.lag_iterations is not None
    assert PointMeasurement(run, POINT, WORTH).outcome("line").learning_seconds == 0


def test_a_later_failure_goes_on_from_what_was_learned_before(run: Trajectory) -> None:
    learned("watcher", run, 50, 300)
    Watcher.slices.clear()
    known = learned("watcher", run, 50, 450)
    assert set(Watcher.slices) == {350, 400, 450}
    assert known.state is not None
    assert known.state["seen"] == list(range(50, 451, 50))
    Watcher.slices.clear()
    assert learned("watcher", run, 50, 450).seconds == known.seconds
    assert not Watcher.slices


def test_what_is_learned_does_not_depend_on_where_a_call_before_left_off(run: Trajectory, tmp_path: Path) -> None:
    again = fault_free(tmp_path / "again", 500)
    for checkpoint in (80, 240, 400):
        stepwise = learned("watcher", run, 20, checkpoint)
    whole = learned("watcher", again, 20, 400)
    assert stepwise.state is not None
    assert whole.state is not None
    assert stepwise.state["seen"] == whole.state["seen"]
    assert torch.equal(stepwise.state["total"], whole.state["total"])
    kept = sorted(int(path.stem) for path in again.directory.glob("learned/*/*.safetensors"))
    assert kept == [200, 400]  # one in ten, and what was asked for


def test_another_interval_learns_apart(run: Trajectory) -> None:
    learned("watcher", run, 50, 300)
    known = learned("watcher", run, 100, 300)
    assert known.state is not None
    assert known.state["seen"] == [100, 200, 300]


def test_a_torn_state_is_named(run: Trajectory) -> None:
    learned("watcher", run, 50, 100)
    (path,) = run.directory.glob("learned/*/*.safetensors")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CPSRError, match="00100"):
        learned("watcher", run, 50, 200)


def test_a_file_of_something_else_is_refused(run: Trajectory) -> None:
    with pytest.raises(CPSRError, match="segment-00050"):
        read_tree(run.path_of(50))


def test_methods_that_learn_the_same_learn_it_once(run: Trajectory) -> None:
    known = learned("vitp", run, 50, 350)
    assert known.seconds > 0
    for name in ("vitp-always",):
        assert learned(name, run, 50, 350).seconds == known.seconds
        assert known.state is not None
        methods.PREDICTORS[name].predictor(50).load_state_dict(known.state)
    assert len(list(run.directory.glob("learned/*"))) == 1


@pytest.mark.parametrize("name", ["vitp", "vitp-elementwise"])
def test_a_network_goes_on_from_a_kept_state_as_if_it_had_never_stopped(
    run: Trajectory, tmp_path: Path, name: str
) -> None:
    for checkpoint in (300, 400):
        stepwise = learned(name, run, 50, checkpoint)
    whole = learned(name, fault_free(tmp_path / "again", 500), 50, 400)
    plain, tensors = encode(stepwise.state)
    again, others = encode(whole.state)
    assert plain == again
    assert all(torch.equal(values, others[key]) for key, values in tensors.items())


def test_only_methods_with_something_to_do_are_shown_the_run() -> None:
    assert sees_the_run("watcher", 50)
    assert not any(sees_the_run(name, 50) for name in ("line", "stale", "line-6-x2"))
