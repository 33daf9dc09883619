import math
from collections.abc import Iterator

import pytest
import torch

from cpsr.predictor.denoise import bands
from cpsr.predictor.line import line_coefficients
from cpsr.predictor.network import (
    MIN_SNAPSHOTS,
    PARAMETERS,
    Geometry,
    corrections,
    cosines,
    initial_parameters,
    pretrained_parameters,
    squared_norms,
)
from cpsr.predictor.protocol import HistoryEntry
from cpsr.predictor.statistics import MAX_SNAPSHOTS

TIMES = [0.0, 1.0, 2.5, 3.0, 4.5, 6.0, 7.0]


def points(times: list[float] = TIMES) -> list[HistoryEntry]:
    return [HistoryEntry(round(100 * time), time, 1.0 / (1.0 + time)) for time in times]


def grams(batch: int, count: int, seed: int = 0) -> torch.Tensor:
    differences = torch.randn(batch, count - 1, 30, generator=torch.Generator().manual_seed(seed))
    products = differences @ differences.transpose(1, 2)
    return products / products.diagonal(dim1=1, dim2=2).sum(dim=1)[:, None, None]


def shaken(seed: int = 0) -> torch.Tensor:
    """Weights that have left their start, so that nothing is zero."""
    generator = torch.Generator().manual_seed(seed)
    return initial_parameters(generator) + 0.1 * torch.randn(PARAMETERS, generator=generator)


@pytest.fixture
def read_anew() -> Iterator[None]:
    """The shipped weights are read again, before and after."""
    pretrained_parameters.cache_clear()
    yield
    pretrained_parameters.cache_clear()


@pytest.mark.usefixtures("read_anew")
def test_pretrained_weights_are_shipped() -> None:
    with torch.inference_mode(), torch.device("meta"):  # whatever the training loop around is in
        found = pretrained_parameters()
    assert (found.shape, found.dtype, found.device.type) == ((PARAMETERS,), torch.float32, "cpu")
    assert not found.is_inference()
    assert bool(torch.isfinite(found).all())
    assert pretrained_parameters() is found


def test_an_untrained_network_adds_nothing() -> None:
    parameters = initial_parameters(torch.Generator().manual_seed(0))
    found = corrections(parameters, Geometry.of(points(), 8.0), grams(5, 7))
    assert torch.equal(found, torch.zeros(5, 7))


@pytest.mark.parametrize("count", [MIN_SNAPSHOTS, 7, MAX_SNAPSHOTS])
def test_corrections_lie_in_the_low_and_mid_band(count: int) -> None:
    times = [0.7 * k + 0.1 * (k % 3) for k in range(count)]
    found = corrections(shaken(), Geometry.of(points(times), times[-1] + 0.5), grams(4, count)).double()
    assert float(found.abs().max()) > 1e-3
    torch.testing.assert_close(found.sum(dim=1), torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-5)
    # They are combinations of the rows that form the low and mid band, which the high band's dimensions are not.
    denoised = torch.from_numpy(bands(times).denoised)
    inside = torch.linalg.pinv(denoised, rtol=1e-9) @ denoised
    torch.testing.assert_close(found @ inside, found, rtol=0, atol=1e-5)
    assert torch.linalg.matrix_rank(inside) == {4: 4, 7: 4, 20: 10}[count]


def test_the_geometry_is_the_lines() -> None:
    geometry = Geometry.of(points(), 8.4)
    row = torch.tensor(line_coefficients(TIMES, 8.0, gain=1.0, base=0.0))
    row[-1] -= 1.0
    torch.testing.assert_close(geometry.line, (row / row.norm()).float())
    assert geometry.query == pytest.approx(0.2)
    torch.testing.assert_close(geometry.scalars[:, 0], (torch.tensor(TIMES) - 7.0) / 7.0)
    torch.testing.assert_close(geometry.scalars[:, 1], 1.0 / (1.0 + torch.tensor(TIMES)))
    assert geometry.scalars[0, 2] == 0.0


def test_one_operator_does_not_see_another() -> None:
    geometry, products = Geometry.of(points(), 8.0), grams(6, 7)
    together = corrections(shaken(), geometry, products)
    products[3] = math.nan
    apart = corrections(shaken(), geometry, products)
    others = [0, 1, 2, 4, 5]
    torch.testing.assert_close(apart[others], together[others])
    assert not bool(torch.isfinite(apart[3]).any())
    torch.testing.assert_close(corrections(shaken(), geometry, products[4:5])[0], together[4], rtol=1e-4, atol=1e-6)


def test_the_scale_of_an_operator_and_of_time_do_not_matter() -> None:
    products = grams(3, 7)
    found = corrections(shaken(), Geometry.of(points(), 8.0), products)
    slower = [HistoryEntry(p.iteration, 1e-4 * p.time, 1e-4 * p.learning_rate) for p in points()]
    torch.testing.assert_close(corrections(shaken(), Geometry.of(slower, 8e-4), 1e3 * products), found)


def test_times_and_the_query_matter() -> None:
    products = grams(3, 7)
    found = corrections(shaken(), Geometry.of(points(), 8.0), products)
    assert not torch.allclose(corrections(shaken(), Geometry.of(points(), 12.0), products), found, atol=1e-4)
    moved = Geometry.of(points([0.0, 2.0, 2.5, 3.0, 4.5, 6.0, 7.0]), 8.0)
    assert not torch.allclose(corrections(shaken(), moved, products), found, atol=1e-4)


def test_cosines_and_norms_are_those_of_the_weights() -> None:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(3, 5, 20, generator=generator, dtype=torch.float64)
    differences = weights[:, 1:] - weights[:, :-1]
    products = differences @ differences.transpose(1, 2)
    rows = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    rows -= rows.mean(dim=1, keepdim=True)
    other = torch.tensor([0.0, -1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    first, second = torch.einsum("bk,bkn->bn", rows, weights), torch.einsum("k,bkn->bn", other, weights)
    torch.testing.assert_close(squared_norms(rows, products), (first**2).sum(dim=1))
    torch.testing.assert_close(cosines(rows, other, products), torch.cosine_similarity(first, second))
    assert cosines(rows, other, 0.0 * products).tolist() == [0.0] * 3
