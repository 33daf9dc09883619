"""The arithmetic of the predictor's memory, and that what is measured stays within it."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpsr.predictor.displacement import measure
from cpsr.predictor.footprint import MIN_ELEMENTS, Footprint, fitted
from cpsr.predictor.protocol import Target
from cpsr.predictor.statistics import MAX_SNAPSHOTS, SLICE_ELEMENTS
from cpsr.predictor.vitp import VITPPredictor
from tests.predictor.conftest import MakeHistory
from tests.predictor.footprint_worker import SMALL_ELEMENTS, peak_bytes, peak_bytes_of_the_line, write_history

LIMIT = 200_000_000


def in_own_process(work: Callable[..., tuple[int, ...]], *arguments: object) -> tuple[int, ...]:
    """What `work` returns in a new process, whose memory nothing else has touched."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


CHUNK = 1 << 20


@given(
    limit=st.integers(1, 10**10),
    operators=st.integers(0, 10**5),
    checkpoints=st.integers(0, 200),
    chunk=st.integers(1, 1 << 22),
    learns=st.booleans(),
)
def test_what_is_granted_stays_within_the_limit_or_is_refused(
    limit: int, operators: int, checkpoints: int, chunk: int, learns: bool
) -> None:
    least = Footprint.least(operators, checkpoints, chunk, learns=learns)
    if least.peak_bytes > limit:
        with pytest.raises(ValueError, match=f"takes {least.peak_bytes} bytes of host memory, {limit} are allowed"):
            fitted(limit, operators, checkpoints, chunk, learns=learns)
        return
    granted = fitted(limit, operators, checkpoints, chunk, learns=learns)
    assert granted.learns == learns
    assert granted.peak_bytes <= limit
    assert MIN_ELEMENTS <= granted.slice_elements <= SLICE_ELEMENTS
    assert min(MIN_ELEMENTS, chunk) <= granted.chunk_elements <= chunk


@given(operators=st.integers(0, 10**5), checkpoints=st.integers(0, 200), chunk=st.integers(1, 1 << 22))
def test_the_line_alone_takes_less(operators: int, checkpoints: int, chunk: int) -> None:
    line, all_of_it = (Footprint.least(operators, checkpoints, chunk, learns=learns) for learns in (False, True))
    assert line.peak_bytes < all_of_it.peak_bytes


def test_a_usual_model_keeps_the_largest_pieces_within_the_default() -> None:
    granted = fitted(LIMIT, operators=300, checkpoints=48, chunk_elements=CHUNK)
    assert (granted.slice_elements, granted.chunk_elements) == (SLICE_ELEMENTS, CHUNK)


def test_a_tight_limit_makes_the_pieces_smaller() -> None:
    roomy = fitted(LIMIT, 300, 48, CHUNK)
    tight = fitted(roomy.peak_bytes - roomy.pieces_bytes + 2_000_000, 300, 48, CHUNK)
    assert tight.slice_elements < SLICE_ELEMENTS
    assert tight.chunk_elements < CHUNK


@pytest.mark.slow
def test_the_measured_memory_follows_the_size_of_the_pieces_and_stays_below_the_bound(tmp_path: Path) -> None:
    write_history(tmp_path, small_operators=5, large_elements=3 << 18, checkpoints=12)
    small_pieces = Footprint(6, 12, 1 << 15, 1 << 15).peak_bytes
    large, bound_of_large, updates = in_own_process(peak_bytes, tmp_path, LIMIT, 6, 12)
    small, bound_of_small, _ = in_own_process(peak_bytes, tmp_path, small_pieces, 6, 12)
    assert updates > 0  # the network is part of what was measured
    assert large <= bound_of_large <= LIMIT
    assert small <= bound_of_small <= small_pieces
    assert small < large - (2 << 20)  # of 18 MiB of pieces


@pytest.mark.slow
@pytest.mark.parametrize("worker", [peak_bytes, peak_bytes_of_the_line])
def test_the_measured_memory_grows_with_the_operators_no_faster_than_its_bound(
    tmp_path: Path, worker: Callable[..., tuple[int, ...]]
) -> None:
    measured, bounds = [], []
    for number in (60, 260):  # of the fewer ones the network already looks at as many together as it ever does
        directory = tmp_path / str(number)
        write_history(directory, number, SMALL_ELEMENTS, MAX_SNAPSHOTS)
        found, bound, *_ = in_own_process(worker, directory, LIMIT, number + 1, MAX_SNAPSHOTS)
        measured.append(found)
        bounds.append(bound)
        assert found <= bound
    assert 0 < measured[1] - measured[0] <= bounds[1] - bounds[0]


def test_nothing_is_taken_on_the_device_that_the_training_loop_works_on(make_history: MakeHistory) -> None:
    moving = torch.randn(2, 40, generator=torch.Generator().manual_seed(0))
    angles = torch.arange(12) * 0.1
    history = make_history(
        list(range(20, 260, 20)),
        [{"w": angle.sin() * moving[0] + angle.cos() * moving[1], "still": torch.ones(3)} for angle in angles],
    )

    def predicted() -> dict[str, torch.Tensor]:
        predictor = VITPPredictor(200, 2.0, direction="vitp")
        for _ in predictor.learn(history):
            pass
        forecast = predictor.forecast(history, Target(255, 255.0, 1.0))
        assert forecast.settings["direction"] == "vitp"
        measure(history, forecast, predictor.predict(history, forecast))
        return {operator: values for operator, _, values in predictor.predict(history, forecast)}

    expected = predicted()
    with torch.device("meta"):  # where any tensor that is made without naming its device would have no values
        found = predicted()
    assert all(torch.equal(found[operator], values) for operator, values in expected.items())


def test_a_history_that_outgrew_the_limit_is_refused_before_anything_is_learned(make_history: MakeHistory) -> None:
    predictor = VITPPredictor()
    predictor.stay_within(Footprint(1, 1, MIN_ELEMENTS, MIN_ELEMENTS).peak_bytes, operators=1, checkpoints=1)
    history = make_history([10, 20], [{"w": torch.zeros(3)}] * 2)
    with pytest.raises(ValueError, match="1 operators over 2 checkpoints"):
        next(predictor.learn(history))
