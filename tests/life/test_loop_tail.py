"""What is put off is done when the loop asks for its next batch, or when it trains on."""

import threading

import torch
from torch import nn

from cpsr import TorchAdapter
from cpsr.learning.learner import Learner
from cpsr.life.loop import LoopTail
from cpsr.life.run_state import RunState
from cpsr.predictor.line import LinePredictor
from cpsr.ranks.group import Group
from cpsr.restart.prediction import Probes
from cpsr.state.losses import LossRecorder


def run_state() -> RunState:
    module = nn.Linear(2, 1)
    adapter = TorchAdapter(module, torch.optim.SGD(module.parameters(), lr=0.1))
    return RunState(adapter, LossRecorder(1), Probes(adapter, 0), Learner(LinePredictor()))


def tail_after_a_step(*, requests: bool = True, pipeline: bool = False) -> tuple[LoopTail, list[str]]:
    tail, done = LoopTail(Group(), run_state(), pipeline), list[str]()
    if requests:
        tail.on_request()
    tail.after_step()
    tail.defer(lambda: done.append("first"))
    tail.defer_here(lambda: done.append("second"))
    return tail, done


def test_it_waits_for_the_next_batch() -> None:
    tail, done = tail_after_a_step()
    assert done == []
    tail.on_request()
    assert done == ["first", "second"]
    tail.finish()
    assert done == ["first", "second"]


def test_the_second_step_on_a_batch_waits_for_the_next_one_too() -> None:
    tail, done = tail_after_a_step()
    tail.finish()
    tail.after_step()
    tail.defer(lambda: done.append("third"))
    assert done == ["first", "second"]
    tail.on_request()
    assert done == ["first", "second", "third"]


def test_a_loop_that_takes_no_batch_has_ended_its_iteration_when_it_trains_on() -> None:
    tail, done = tail_after_a_step(requests=False)
    assert done == []
    tail.finish()
    assert done == ["first", "second"]


def test_a_pipeline_requests_batches_when_its_iteration_has_ended() -> None:
    tail, done = tail_after_a_step(pipeline=True)
    tail.on_request()
    assert done == []
    tail.finish()
    assert done == ["first", "second"]


def test_a_batch_that_another_thread_fetches_ahead_ends_nothing() -> None:
    tail, done = tail_after_a_step()
    thread = threading.Thread(target=tail.on_request)
    thread.start()
    thread.join()
    assert done == []


def test_what_is_dropped_is_never_done() -> None:
    tail, done = tail_after_a_step()
    tail.drop()
    tail.on_request()
    assert done == []
