"""Which loaders of accelerate deal one order of a pass to any number of ranks, and how it goes on on other ranks."""

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

from cpsr.state.loader import ResumableLoader
from cpsr.state.loader_passes import Dealing
from cpsr.state.small_state import DataPosition

pytest.importorskip("accelerate")
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader

Passes: Any = importlib.import_module("cpsr.integrations.accelerate").Passes

DATA = TensorDataset(torch.arange(96))


def prepared(ranks: int, rank: int = 0, batch_size: int = 2, seedable: bool = True, **loading: Any) -> Any:
    """What accelerate makes of a loader for a rank of so many."""
    Accelerator(cpu=True)  # its state, which the loader asks for
    torch.manual_seed(3)
    loading = {"shuffle": True, **loading}
    if "batch_sampler" not in loading:
        loading["batch_size"] = batch_size
    return prepare_data_loader(
        DataLoader(DATA, **loading), num_processes=ranks, process_index=rank, use_seedable_sampler=seedable
    )


@given(
    sizes=st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=2, max_size=5),
    steps=st.lists(st.integers(1, 2), min_size=5, max_size=5),
    seedable=st.booleans(),
)
def test_batches_of_changing_ranks_are_one_order(sizes: list[int], steps: list[int], seedable: bool) -> None:
    order = {} if seedable else {"shuffle": False}
    whole = [int(one) for batch in prepared(1, seedable=seedable, **order).batch_sampler for one in batch]
    position, seen = DataPosition(), list[int]()
    for ranks, count in zip(sizes, steps, strict=False):
        batch_size = 12 // ranks
        loaders = [prepared(ranks, rank, batch_size, seedable, **order) for rank in range(ranks)]
        stream = ResumableLoader(Passes(len(loaders[0]), loaders[0]), replace(position, resized=True), until_epoch=None)
        dealt = [list(loader.batch_sampler) for loader in loaders]
        for _ in range(min(count, 8 - len(seen) // 12)):
            number = next(stream)
            seen += [int(one) for rank in range(ranks) for one in dealt[rank][number]]
        position = DataPosition(**stream.saved_position().to_tree())
    assert seen == whole[: len(seen)]


@pytest.mark.parametrize(
    ("loading", "samples", "one_order"),
    [
        ({"ranks": 2, "seedable": False}, 4, True),  # accelerate gives it a generator
        ({"ranks": 1, "seedable": False}, 2, False),  # from the global random state
        ({"ranks": 1, "seedable": False, "generator": torch.Generator()}, 2, True),
        ({"ranks": 2, "shuffle": False}, 4, True),
        ({"ranks": 2, "shuffle": None, "sampler": type("Own", (SequentialSampler,), {})(DATA)}, 4, False),
        ({"ranks": 2, "shuffle": False, "batch_sampler": [[1], [2, 3]]}, None, False),
    ],
)
def test_what_is_known_of_a_loader(loading: dict[str, Any], samples: int | None, one_order: bool) -> None:
    passes = Passes(6, prepared(**loading), batches=3)
    assert passes.samples == (None if samples is None else 3 * samples)
    assert passes.one_order == one_order
    dealing = Dealing(1, 3 * samples, 7) if one_order and samples else None
    assert Dealing.of_loader(passes, 7) == dealing
