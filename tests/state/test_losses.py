"""Losses stay tensors until they are flushed, and every iteration gets its own."""

import torch

from cpsr.state.losses import RECENT_LOSSES, LossRecorder, Step


def step(iteration: int) -> Step:
    return Step(iteration, 1e-3, 0.1, True)


def test_micro_batches_are_averaged_and_flushed_together() -> None:
    recorder = LossRecorder(flush_iterations=2)
    recorder.add(torch.tensor(1.0))
    recorder.add(torch.tensor(3.0))
    assert recorder.end_iteration(step(1)) == []
    assert recorder.latest() == 2.0
    recorder.add(torch.tensor(5.0))
    assert [(done.iteration, done.loss) for done in recorder.end_iteration(step(2))] == [(1, 2.0), (2, 5.0)]
    assert list(recorder.recent) == [2.0, 5.0]
    assert recorder.latest() == 5.0, "known also right after a flush"


def test_an_iteration_without_a_loss_has_none() -> None:
    recorder = LossRecorder(flush_iterations=10)
    recorder.end_iteration(step(1))
    recorder.add(torch.tensor(4.0))
    recorder.end_iteration(step(2))
    assert [(done.iteration, done.loss) for done in recorder.flush(wait=True)] == [(1, None), (2, 4.0)]
    assert list(recorder.recent) == [4.0]
    assert recorder.flush(wait=True) == []


def test_recent_losses_are_bounded_and_restart_with_the_checkpoints() -> None:
    recorder = LossRecorder(flush_iterations=1)
    for iteration in range(2 * RECENT_LOSSES):
        recorder.add(torch.tensor(float(iteration)))
        recorder.end_iteration(step(iteration))
    assert len(recorder.recent) == RECENT_LOSSES
    recorder.add(torch.tensor(9.0))
    recorder.restart([1.0, 2.0])
    assert list(recorder.recent) == [1.0, 2.0]
    assert recorder.latest() is None
