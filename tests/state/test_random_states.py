"""Random states come back exactly, and positions cross the ends of passes."""

import random
from typing import Any

import numpy
import pytest
import torch

from cpsr.state.codec import decode, encode
from cpsr.state.small_state import DataPosition, capture_rng, restore_rng
from tests.device import DEVICE
from tests.stand_in_device import stand_in_device

HOST = torch.device("cpu")


def draw() -> tuple[float, float, float, float]:
    on_device = float(torch.rand((), device=DEVICE))
    return random.random(), float(numpy.random.rand()), float(torch.rand(())), on_device


def test_random_states_survive_the_codec() -> None:
    draw()
    state = decode(*encode(capture_rng(torch.device(DEVICE))))
    expected = [draw() for _ in range(3)]
    restore_rng(state, torch.device(DEVICE))
    assert [draw() for _ in range(3)] == expected


def saved_on(gpus: list[int]) -> dict[str, Any]:
    return {**capture_rng(), "cuda": [torch.tensor([10 + index], dtype=torch.uint8) for index in gpus]}


def test_only_the_state_of_the_ranks_own_gpu_is_captured() -> None:
    with stand_in_device(3) as device:
        state = decode(*encode(capture_rng(torch.device("cuda", 2))))
        assert device.trace == [("get_rng_state", None, "cuda:2")]
    with stand_in_device(1) as device:  # in the next life the rank sees one GPU
        assert restore_rng(state, torch.device("cuda", 0)) is None
        assert [int(state) for state in device.random_states] == [2]


def test_a_run_on_the_host_asks_no_gpu() -> None:
    with stand_in_device() as device:
        assert capture_rng(HOST)["cuda"] == []
        assert restore_rng(capture_rng(HOST), HOST) is None
        assert device.trace == []


@pytest.mark.parametrize(
    ("gpus", "onto", "says"),
    [
        ([0], HOST, "random states of the host are restored, those of a GPU are not: this rank has none"),
        ([], torch.device("cuda", 1), "that of cuda:1 goes on as it is: none of a GPU was saved"),
    ],
)
def test_it_says_what_could_not_be_restored(gpus: list[int], onto: torch.device, says: str) -> None:
    with stand_in_device(4) as device:
        state = saved_on(gpus)
        expected = draw()[:3]
        note = restore_rng(state, onto)
        assert note is not None
        assert says in note
        assert draw()[:3] == expected, "the host's are restored"
        assert device.calls("set_rng_state") == []


def test_positions_cross_passes() -> None:
    position = DataPosition(batches=7, epoch=1, batch=2, batches_per_epoch=5)
    assert position.advanced(3) == DataPosition(batches=10, epoch=2, batch=0, batches_per_epoch=5)
    assert position.advanced(14) == DataPosition(batches=21, epoch=4, batch=1, batches_per_epoch=5)
    assert DataPosition(batch=3).advanced(4) == DataPosition(batches=4, batch=7)
