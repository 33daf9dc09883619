from collections.abc import Iterator

import numpy
import pytest
import torch

from cpsr.predictor.denoise import bands
from cpsr.predictor.network import (
    MIN_SNAPSHOTS,
    PARAMETERS,
    Geometry,
    corrections,
    pretrained_parameters,
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
    return pretrained_parameters() + 0.1 * torch.randn(PARAMETERS, generator=generator)


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


@pytest.mark.parametrize("count", [MIN_SNAPSHOTS, 7, MAX_SNAPSHOTS])
def test_corrections_lie_in_the_low_and_mid_band(count: int) -> None:
    times = [0.7 * k + 0.1 * (k % 3) for k in range(count)]
    found = corrections(shaken(), Geometry.of(points(times), times[-1] + 0.5), grams(4, count)).double()
    assert float(found.abs().max()) > 1e-3
    torch.testing.assert_close(found.sum(dim=1), torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-5)
    # They are combinations of the rows that form the low and mid band, which the high band's dimensions are not.
    both = torch.from_numpy(numpy.add(*bands(times)))
    inside = torch.linalg.pinv(both, rtol=1e-9) @ both
    torch.testing.assert_close(found @ inside, found, rtol=0, atol=1e-5)
    assert torch.linalg.matrix_rank(inside) == {4: 4, 7: 4, 20: 10}[count]


def test_the_scale_of_an_operator_and_of_time_do_not_matter() -> None:
    products = grams(3, 7)
    found = corrections(shaken(), Geometry.of(points(), 8.0), products)
    slower = [HistoryEntry(p.iteration, 1e-4 * p.time, 1e-4 * p.learning_rate) for p in points()]
    torch.testing.assert_close(corrections(shaken(), Geometry.of(slower, 8e-4), 1e3 * products), found)
