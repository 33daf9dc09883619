import math

import pytest

from cpsr.simulate.iteration import Collective, Pipeline, iteration_seconds, sparse_window_iterations


def test_pipeline_by_hand() -> None:
    assert Pipeline(16, (0.1, 0.2, 0.15)).seconds == pytest.approx(18 * 0.2)


def test_the_slowest_pipeline_and_what_nothing_hides() -> None:
    pipelines = [Pipeline(4, (0.1, 0.1)), Pipeline(4, (0.1, 0.3))]
    all_reduce = Collective(alpha_seconds=0.01, beta_seconds_per_byte=1e-9, message_bytes=2e8, overlap_fraction=0.5)
    assert all_reduce.exposed_seconds == pytest.approx(0.105)
    assert iteration_seconds(pipelines, [all_reduce], update_seconds=0.02) == pytest.approx(5 * 0.3 + 0.105 + 0.02)


def test_window_is_the_smallest_whose_snapshots_fit() -> None:
    # 64 operators of 12 bytes (2 while frozen): a whole snapshot of 768 bytes, at 10 bytes a second.
    assert sparse_window_iterations(64, 12, 2, 10, seconds=76.8) == 1
    window = sparse_window_iterations(64, 12, 2, 10, seconds=30.0)
    active = math.floor((300 - 128) / 10)
    assert window == math.ceil(64 / active)


def test_window_ends_at_two_operators_a_snapshot() -> None:
    assert sparse_window_iterations(64, 12, 2, 10, seconds=0.001) == 32
