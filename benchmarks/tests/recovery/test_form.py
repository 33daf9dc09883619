"""States that the benchmark forms itself, against plain torch."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from cpsr.benchmarks.recovery.form import form_weights_only
from cpsr.benchmarks.recovery.grid import Point
from cpsr.benchmarks.recovery.measure import PointMeasurement
from cpsr.benchmarks.recovery.trajectory import Trajectory
from cpsr.benchmarks.tests.recovery.tiny import TINY, TinyTask, fault_free, one_thread
from cpsr.fitter.end_cost import IterationWorth

POINT = Point(interval=50, fraction=0.5, checkpoint=450, failure=488)
WORTH = IterationWorth(2e-5, 1e-6, TINY.iterations)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Trajectory:
    with one_thread():
        return fault_free(tmp_path_factory.mktemp("cache"), TINY.iterations)


def new_optimizer_from(run: Trajectory, iteration: int) -> nn.Module:
    """The run's weights there, trained to the end by a new AdamW at the schedule's rates."""
    task = TinyTask()
    model = task.model()
    weights = run.at(iteration).weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name].view_as(parameter))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01, fused=True)
    for at in range(iteration, TINY.iterations):
        optimizer.zero_grad()
        task.loss(model, task.batch(0, at)).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = TINY.learning_rate(at)
        optimizer.step()
    return model


def test_weights_alone_go_on_from_the_checkpoint_before_under_a_new_optimizer(run: Trajectory) -> None:
    with one_thread():
        outcome = PointMeasurement(run, POINT, WORTH).outcome("weights-only")
        losses = TinyTask().final_losses(new_optimizer_from(run, 400)).detach().double().numpy()
    gap = float((losses - run.final_losses()).mean())
    assert gap != 0.0
    assert outcome.final_gap_nats == gap
    assert outcome.repeated_iterations == 88
    assert outcome.end_cost_iterations == pytest.approx(gap / WORTH.nats + 88)
    assert outcome.curve is not None
    assert outcome.curve["iterations"][0] == POINT.failure
    assert "the weights of checkpoint 400" in outcome.reason


def test_ranks_that_have_lost_nothing_go_back_with_the_others(run: Trajectory) -> None:
    with one_thread():
        whole, part = (
            PointMeasurement(run, point, WORTH).outcome("weights-only") for point in (POINT, replace(POINT, lost="1/4"))
        )
    assert part.end_cost_iterations == whole.end_cost_iterations


def test_before_the_first_checkpoint_all_is_trained_again(run: Trajectory) -> None:
    first = Point(interval=50, fraction=0.25, checkpoint=50, failure=92)
    with one_thread():
        outcome = PointMeasurement(run, first, WORTH).outcome("weights-only")
    assert (outcome.final_gap_nats, outcome.end_cost_iterations) == (0.0, 92.0)


def test_a_state_knows_where_its_optimizer_began(run: Trajectory) -> None:
    with one_thread():
        state = form_weights_only(run, POINT).state
        assert state is not None
        assert (state.iteration, state.optimizer_since) == (400, 400)
        assert state.digest() != replace(state, optimizer_since=0).digest()
        one, other = run.trainer(), run.trainer()
        one.load(state)
        one.train_to(410)
        other.load(one.state())
        one.train_to(420)
        other.train_to(420)
    assert one.state().digest() == other.state().digest()
    assert one.state().optimizer_since == 400
