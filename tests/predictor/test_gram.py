from collections.abc import Callable
from typing import Any

import pytest
import torch

from cpsr.predictor.pieces import gram

MakeHistory = Callable[..., Any]
ITERATIONS = [10, 20, 30, 45, 50]


def weights(seed: int = 0, size: int = 1000) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [{"w": 1.0 + 0.1 * torch.randn(size, generator=generator)} for _ in ITERATIONS]


def reference(series: list[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack([values.double() for values in series])
    differences = stacked[1:] - stacked[:-1]
    return differences @ differences.T


def test_it_is_the_products_of_the_differences(make_history: MakeHistory) -> None:
    steps = weights()
    result = gram(make_history(ITERATIONS, steps), "w")
    assert (result.shape, result.dtype) == ((4, 4), torch.float64)
    # Differences are formed in float32 pieces: 6e-8 of each, over products that mostly cancel off the diagonal.
    torch.testing.assert_close(result, reference([step["w"] for step in steps]), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(result, result.T, rtol=0, atol=0)


def test_the_sums_of_ranks_are_the_whole(make_history: MakeHistory) -> None:
    steps = weights()
    parts = [gram(make_history(ITERATIONS, [{"w": step["w"][cut]} for step in steps]), "w")
             for cut in (slice(0, 371), slice(371, None))]  # fmt: skip
    torch.testing.assert_close(parts[0] + parts[1], gram(make_history(ITERATIONS, steps), "w"), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("block_elements", [4, 7, 400, 10**6])
def test_memory_is_bounded_and_changes_only_rounding(make_history: MakeHistory, block_elements: int) -> None:
    history = make_history(ITERATIONS, weights())
    result = gram(history, "w", block_elements=block_elements)
    torch.testing.assert_close(result, gram(history, "w"), rtol=1e-12, atol=1e-12)
    history.largest_piece = 0
    gram(history, "w", block_elements=block_elements)
    assert history.largest_piece <= block_elements // 4


def test_it_can_be_taken_over_some_of_the_entries(make_history: MakeHistory) -> None:
    steps = weights()
    history = make_history(ITERATIONS, steps)
    chosen = gram(history, "w", [0, 2, 4])
    torch.testing.assert_close(chosen, reference([steps[k]["w"] for k in (0, 2, 4)]), rtol=1e-6, atol=1e-6)
    assert history.pieces_read == 3  # each snapshot once
