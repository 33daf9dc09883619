"""A captured random state is the generator's own, whatever has happened to it since the last capture."""

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsr.state import codec
from cpsr.state.host_random import capture_host_rng, restore_host_rng

_saved: dict[str, Any] = {"numpy": numpy.random.get_state(), "python": random.getstate()}


def _save() -> None:
    _saved.update(numpy=numpy.random.get_state(), python=random.getstate())


ACTS: list[Callable[[], object]] = [
    random.random,
    lambda: random.gauss(0.0, 1.0),
    lambda: random.seed(5),
    lambda: random.setstate(_saved["python"]),
    numpy.random.random_sample,
    numpy.random.standard_normal,  # every second one is kept from the draw before
    lambda: numpy.random.seed(6),
    lambda: numpy.random.set_state(_saved["numpy"]),
    _save,
    torch.random.seed,
    lambda: torch.rand(3),
    lambda: restore_host_rng(capture_host_rng()),
    lambda: None,
]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(ACTS), max_size=12))
def test_a_capture_is_what_each_library_returns(acts: list[Callable[[], object]]) -> None:
    _save()
    for act in acts:
        act()
        captured = capture_host_rng()
        assert captured["python"] == random.getstate()
        assert codec.same(captured["numpy"], numpy.random.get_state())
        assert torch.equal(captured["torch"], torch.get_rng_state())


def test_a_state_between_two_normal_numbers_comes_back() -> None:
    """NumPy keeps the second number of each pair: the words of its generator are the same before and after it."""
    numpy.random.seed(7)
    numpy.random.standard_normal()
    between = numpy.random.get_state()
    numpy.random.standard_normal()
    capture_host_rng()
    numpy.random.set_state(between)
    captured = capture_host_rng()
    second = numpy.random.standard_normal()
    restore_host_rng(captured)
    assert numpy.random.standard_normal() == pytest.approx(second, abs=0.0)


@pytest.mark.filterwarnings("ignore:get_state and legacy")
def test_another_algorithm_of_numpy_is_read_each_time() -> None:
    generators: Any = numpy.random  # NumPy's stubs lack the two functions
    before = generators.get_bit_generator()
    capture_host_rng()
    try:
        for other in (numpy.random.PCG64(3), numpy.random.MT19937(4)):
            generators.set_bit_generator(other)
            for _ in range(3):
                numpy.random.random_sample()
                assert codec.same(capture_host_rng()["numpy"], numpy.random.get_state())
    finally:
        generators.set_bit_generator(before)
