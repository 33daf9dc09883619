"""Random states and the small state come back exactly."""

import random

import numpy
import torch

from cpsr.state.codec import decode, encode
from cpsr.state.scalars import DataPosition, Scalars, capture_rng, restore_rng


def draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def test_random_states_survive_the_codec() -> None:
    draw()
    state = decode(*encode(capture_rng()))
    expected = [draw() for _ in range(3)]
    restore_rng(state)
    assert [draw() for _ in range(3)] == expected


def test_positions_cross_passes() -> None:
    position = DataPosition(batches=7, epoch=1, batch=2, batches_per_epoch=5)
    assert position.advanced(3) == DataPosition(batches=10, epoch=2, batch=0, batches_per_epoch=5)
    assert position.advanced(14) == DataPosition(batches=21, epoch=4, batch=1, batches_per_epoch=5)
    assert DataPosition(batch=3).advanced(4) == DataPosition(batches=4, batch=7)


def test_scalars_survive_the_codec() -> None:
    scalars = Scalars(
        iteration=3,
        cumulative_learning_rate=0.1,
        learning_rate=1e-3,
        peak_learning_rate=2e-3,
        origin="trained",
        lineage=[],
        history_start=0,
        engine={"step": 3},
        rng={},
        data=DataPosition(batches=3, states={"torch": torch.arange(3)}),
    )
    back = Scalars.from_tree(decode(*encode(scalars.to_tree())))
    assert back.data.states is not None
    assert torch.equal(back.data.states["torch"], torch.arange(3))
    assert back.engine == {"step": 3}
    assert back.cumulative_learning_rate == 0.1
