"""The global batch stays, or the start is refused with what fits."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from cpsr.elastic.global_batch import GlobalBatch
from cpsr.engines.torch import TorchAdapter
from cpsr.errors import RecoveryError
from cpsr.state.loader_passes import GlobalBatches


def adapter(steps: int) -> TorchAdapter:
    module = torch.nn.Linear(2, 1)
    return TorchAdapter(module, torch.optim.SGD(module.parameters()), micro_batches_per_iteration=steps)


def loader(batch_size: int | None) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(24)), batch_size)


def test_the_first_life_decides() -> None:
    batch = GlobalBatch(adapter(3), None)
    batch.require(loader(4))
    assert batch.size == 12


def test_on_as_many_ranks_it_may_change() -> None:
    batch = GlobalBatch(adapter(3), None)
    batch.continue_from(10, resized=False)
    batch.require(loader(4))
    assert batch.size == 12


@pytest.mark.parametrize(("asked", "saved"), [(10, None), (None, 10), (10, 12)])
def test_on_another_number_of_ranks_it_may_not(asked: int | None, saved: int | None) -> None:
    batch = GlobalBatch(adapter(3), asked)
    batch.continue_from(saved, resized=True)
    with pytest.raises(RecoveryError, match=r"batches of 4 x 3 accumulated\), the run trains on 10"):
        batch.require(loader(4))
    with pytest.raises(RecoveryError, match="take batches of 2 and 5 accumulation steps"):
        batch.require(loader(4))


def test_batches_of_all_ranks_are_compared_where_their_samples_are_known() -> None:
    batch = GlobalBatch(adapter(3), 12)
    batch.require(GlobalBatches(6, None, one_order=False))
    assert batch.size is None
    batch.require(GlobalBatches(6, 4, one_order=False))
    assert batch.size == 12
    with pytest.raises(RecoveryError, match="would train on 15 samples"):
        batch.require(GlobalBatches(6, 5, one_order=True))


def test_what_gives_no_batches_of_one_size_is_not_compared() -> None:
    batch = GlobalBatch(adapter(3), 10)
    batch.continue_from(10, resized=True)
    batch.require([1, 2])
    batch.require(loader(None))
    assert batch.size == 10
