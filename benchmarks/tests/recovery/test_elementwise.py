import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cpsr.benchmarks.recovery.methods.elementwise import (
    BLOCK_ELEMENTS,
    STEP_ELEMENTS,
    STEPS_PER_CHECKPOINT,
    ElementwisePredictor,
)
from cpsr.benchmarks.recovery.methods.elementwise_network import MAX_SNAPSHOTS, new_network, timing
from cpsr.predictor.denoise import bands
from cpsr.predictor.protocol import Target
from cpsr.state.codec import decode, encode

MakeHistory = Callable[..., Any]
TARGET = Target(1030, 1030.0, 1.0)


def iterations(count: int) -> list[int]:
    return list(range(1050 - 50 * count, 1001, 50))


def bending(count: int, numel: int = 2048) -> list[dict[str, torch.Tensor]]:
    """Weights that slow down by the same share in every interval, with some noise: any line runs ahead of them."""
    generator = torch.Generator().manual_seed(5)
    start, noise = torch.randn(numel, generator=generator), 0.001
    return [
        {"w": start + 4.0 * math.exp(-k / 6.0) + noise * torch.randn(numel, generator=generator)} for k in range(count)
    ]


def whole(predictor: ElementwisePredictor, history: Any, target: Target = TARGET, name: str = "w") -> torch.Tensor:
    forecast = predictor.forecast(history, target)
    assert forecast.feasible, forecast.reason
    return torch.cat([values for operator, _, values in predictor.predict(history, forecast) if operator == name])


def trained(make_history: MakeHistory, weights: list[dict[str, torch.Tensor]], **options: Any) -> ElementwisePredictor:
    predictor = ElementwisePredictor(**options)
    at = iterations(len(weights))
    for count in range(1, len(weights) + 1):
        for _ in predictor.learn(make_history(at[:count], weights[:count])):
            pass
    return predictor


def test_it_starts_at_the_extrapolated_baseline(make_history: MakeHistory) -> None:
    weights, at = bending(9), iterations(9)
    row = torch.from_numpy(bands([float(iteration) for iteration in at]).baseline_at(1030.0)).float()
    expected = sum(value * step["w"] for value, step in zip(row, weights, strict=True))
    torch.testing.assert_close(whole(ElementwisePredictor(), make_history(at, weights)), expected, rtol=0, atol=1e-5)


def test_it_learns_where_the_weights_went_from_the_baseline(make_history: MakeHistory) -> None:
    weights, at = bending(20), iterations(20)
    history = make_history(at[:-1], weights[:-1])
    predictor = trained(make_history, weights[:-1])
    target, truth = Target(1000, 1000.0, 1.0), weights[-1]["w"]
    before = float((whole(ElementwisePredictor(), history, target) - truth).norm())
    after = float((whole(predictor, history, target) - truth).norm())
    assert after < 0.5 * before


def test_learning_goes_on_after_a_failure_as_if_there_had_been_none(make_history: MakeHistory) -> None:
    weights, at = bending(9), iterations(9)
    predictor = trained(make_history, weights[:-1])
    predictor.record({"lag_iterations": 2.0})
    data, tensors = encode(predictor.state_dict(), prefix="learned")
    assert sum(values.numel() * values.element_size() for values in tensors.values()) < 400_000
    successor = ElementwisePredictor()
    successor.load_state_dict(decode(data, tensors))
    history = make_history(at, weights)
    for one in (predictor, successor):
        for _ in one.learn(history):
            pass
    assert torch.equal(whole(predictor, history), whole(successor, history))
    assert successor.forecast(history, TARGET).settings["steps"] > 4 * STEPS_PER_CHECKPOINT - 1


def test_a_checkpoint_is_taken_in_once(make_history: MakeHistory) -> None:
    weights = bending(9)
    predictor = trained(make_history, weights)
    assert list(predictor.learn(make_history(iterations(9), weights))) == []


def test_a_slice_reads_one_short_stretch_of_one_tensor(make_history: MakeHistory) -> None:
    weights = [{"large": torch.randn(5 * STEP_ELEMENTS + 3), "small": torch.randn(7)} for _ in range(24)]
    history = make_history(iterations(24), weights)
    slices = ElementwisePredictor().learn(history)
    before, most = 0, 0
    for _ in slices:
        most = max(most, history.pieces_read - before)
        before = history.pieces_read
    assert history.largest_piece == STEP_ELEMENTS
    assert 0 < most <= MAX_SNAPSHOTS + 6  # what it sees and its pivot, what is asked for, and four later ones


def test_tokens_are_the_same_wherever_they_lie_in_a_tensor(make_history: MakeHistory) -> None:
    weights = bending(9, numel=BLOCK_ELEMENTS + 3 * 1024 + 100)
    split = [{"first": step["w"][:BLOCK_ELEMENTS], "rest": step["w"][BLOCK_ELEMENTS:]} for step in weights]
    predictor = trained(make_history, weights)
    together = whole(predictor, make_history(iterations(9), weights))
    apart = make_history(iterations(9), split)
    pieces = [whole(predictor, apart, name=name) for name in ("first", "rest")]
    torch.testing.assert_close(together, torch.cat(pieces), rtol=0, atol=1e-5)
    assert not torch.equal(together, whole(ElementwisePredictor(), make_history(iterations(9), weights)))


def test_three_snapshots_have_no_mid_band_and_keep_the_baseline(make_history: MakeHistory) -> None:
    weights = bending(9)
    predictor = trained(make_history, weights)
    history = make_history(iterations(3), weights[-3:])
    assert torch.equal(whole(predictor, history), whole(ElementwisePredictor(), history))


def test_other_tokens_are_another_network(make_history: MakeHistory) -> None:
    weights = bending(9)
    wide = trained(make_history, weights, token_elements=4096)
    assert bool(torch.isfinite(whole(wide, make_history(iterations(9), weights))).all())
    with pytest.raises(ValueError, match="tokens of 4096 values; this is version 1 with 1024"):
        ElementwisePredictor().load_state_dict(wide.state_dict())


@pytest.mark.parametrize("token_elements", [0, -4, 1000, 16384])
def test_tokens_that_do_not_fill_a_step_are_refused(token_elements: int) -> None:
    with pytest.raises(ValueError, match=f"token_elements = {token_elements}: expected a power of 2, at most 8192"):
        ElementwisePredictor(token_elements=token_elements)


def test_a_new_network_gives_nothing_and_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    network = new_network(16, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    times = timing(torch.tensor([0.0, 1.0, 2.0, 4.0], dtype=torch.float64), 5.0)
    assert not bool(network(torch.randn(3, 4, 16), times).any())
    again = new_network(16, seed=1)
    assert all(torch.equal(left, right) for left, right in zip(network.parameters(), again.parameters(), strict=True))


def test_timing_is_in_spans_of_the_window_and_in_mean_gaps() -> None:
    found = timing(torch.tensor([10.0, 11.0, 12.0, 14.0], dtype=torch.float64), 15.0)
    torch.testing.assert_close(found[:, 0], torch.tensor([-1.0, -0.75, -0.5, 0.0, 0.25]))
    torch.testing.assert_close(found[:, 1], torch.tensor([0.0, 0.75, 0.75, 1.5, 0.75]))
    torch.testing.assert_close(found[:, 2:7] ** 2 + found[:, 7:] ** 2, torch.ones(5, 5))  # cosines and sines


def test_order_and_time_reach_the_answer() -> None:
    network = new_network(16, seed=1)
    with torch.no_grad():
        network.head.weight.normal_(generator=torch.Generator().manual_seed(2))
    mid = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(3))
    even, later = (timing(torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64), asked) for asked in (3.5, 4.0))
    with torch.no_grad():
        found = network(mid, even)
        assert not torch.allclose(found, network(mid, later))
        assert not torch.allclose(found, network(mid.flip(1), even))
        torch.testing.assert_close(found[:1], network(mid[:1], even))
