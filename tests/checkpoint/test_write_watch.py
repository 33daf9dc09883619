"""Writes into weights between a step and the next update: those that torch counts, and others."""

from collections.abc import Callable

import pytest
import torch

from cpsr.checkpoint.boundary import THOROUGH_SNAPSHOTS, WriteWatch
from cpsr.state.shard import OperatorState, ParamSlice, Shard
from tests.stand_in_device import stand_in_device

COPY, OTHER = "a snapshot", "that of a window"


def shard_of(*tensors: torch.Tensor) -> Shard:
    return Shard(
        {
            str(at): OperatorState(
                str(at), ParamSlice(one.view(-1), tuple(one.shape)), {"exp_avg": one.view(-1) * 0}, 0
            )
            for at, one in enumerate(tensors)
        }
    )


def counted(weights: torch.Tensor) -> None:
    weights[3].add_(1)


def through_data(weights: torch.Tensor) -> None:
    weights.data.add_(1)


def one_row(weights: torch.Tensor) -> None:
    weights.data[17] += 1


@pytest.mark.parametrize("write", [counted, through_data, one_row])
def test_a_write_is_seen_in_the_forward_even_if_it_is_undone(write: Callable[[torch.Tensor], None]) -> None:
    weights, watch = torch.randn(40, 8), WriteWatch()
    shard = shard_of(weights, torch.randn(5))
    before = weights.clone()
    watch.begin(COPY, shard, thorough=True)
    assert not watch.look()
    write(weights)
    assert watch.look()
    weights.data.copy_(before)
    assert watch.look(forward=False)
    watch.end(COPY)
    assert watch.disturbed
    assert not watch.look()


def test_a_loop_is_trusted_once_enough_copies_were_watched() -> None:
    weights, watch = torch.randn(40, 8), WriteWatch()
    shard = shard_of(weights)
    for _ in range(THOROUGH_SNAPSHOTS):
        assert not watch.trusted
        watch.begin(COPY, shard, thorough=False)
        assert not watch.look(forward=False)
        watch.end(COPY)
        weights.add_(1)  # the update
    assert watch.trusted
    watch.begin(COPY, shard, thorough=False)
    through_data(weights)
    assert watch.look()
    assert not watch.trusted


def test_a_device_is_not_waited_for_before_the_copy_must_be_complete() -> None:
    with stand_in_device() as device:
        weights = device.tensor(torch.zeros(64))
        shard = Shard({"w": OperatorState("w", ParamSlice(weights, (64,)), {}, 0)})
        watch = WriteWatch()
        device.at_once = False
        watch.begin(COPY, shard, thorough=True)
        for undone in (1.0, -1.0):
            weights.data.add_(undone)
            assert not watch.look()
        assert not [call for call in device.trace if call[0] == "synchronize"]
        assert watch.look(forward=False)
