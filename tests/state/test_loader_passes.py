"""Each sample of a pass is dealt once, however often the number of ranks changes within it."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

from cpsr.errors import RecoveryError
from cpsr.state.loader import ResumableLoader
from cpsr.state.small_state import DataPosition


def loader(samples: int, ranks: int, rank: int, batch_size: int, **loading: Any) -> DataLoader[Any]:
    data = TensorDataset(torch.arange(samples))
    loading = {"drop_last": False, "shuffle": True, **loading}
    order = {"shuffle": loading.pop("shuffle"), "drop_last": loading["drop_last"]}
    sampler: DistributedSampler[Any] = DistributedSampler(data, ranks, rank, **order)
    return DataLoader(data, batch_size, sampler=sampler, **loading)


def trained(
    positions: list[DataPosition], samples: int, batch_size: int, batches: int, **loading: Any
) -> tuple[list[DataPosition], list[int]]:
    """Train so many batches on each rank; the positions afterwards and the samples in the order of the ranks."""
    ranks, after, seen = len(positions), [], []
    for rank, position in enumerate(positions):
        data = loader(samples, ranks, rank, batch_size, **loading)
        stream = ResumableLoader(data, position, until_epoch=None)
        for _ in range(batches):
            seen += next(stream)[0].tolist()
        after.append(stream.saved_position().advanced(0))
    return after, seen


def restarted(positions: list[DataPosition], ranks: int) -> list[DataPosition]:
    """As another number of ranks restores them, through plain data."""
    saved = [DataPosition(**positions[rank % len(positions)].to_tree()) for rank in range(ranks)]
    return [replace(position, resized=True) for position in saved] if ranks != len(positions) else saved


@settings(max_examples=40)
@given(
    sizes=st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=2, max_size=5),
    steps=st.lists(st.integers(0, 2), min_size=5, max_size=5),
    samples=st.integers(130, 190),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
)
def test_a_pass_over_changing_ranks_deals_each_sample_once(
    sizes: list[int], steps: list[int], samples: int, drop_last: bool, shuffle: bool
) -> None:
    loading = {"drop_last": drop_last, "shuffle": shuffle}
    positions, seen = [DataPosition()] * sizes[0], []
    for ranks, count in zip(sizes, steps, strict=False):
        positions = restarted(positions, ranks)
        positions, new = trained(positions, samples, 12 // ranks, count, **loading)
        seen += new
    assert len(seen) == len(set(seen)) == 12 * sum(steps[: len(sizes)])
    # What is left of the pass on the last number of ranks.
    while positions[0].epoch == 0:
        positions, new = trained(positions, samples, 12 // sizes[-1], 1, **loading)
        seen += new
    counts = Counter(seen)
    left_out = samples - len(counts)
    repeated = sum(count - 1 for count in counts.values())
    assert repeated <= (0 if drop_last else sizes[-1] - 1)
    assert left_out <= (12 + sizes[-1] if drop_last else 0)


def test_the_next_pass_is_dealt_as_if_nothing_had_been() -> None:
    positions, _ = trained([DataPosition()] * 4, 24, 1, 3)
    positions, _ = trained(restarted(positions, 2), 24, 1, 6)  # the rest
    assert {(one.epoch, one.batch) for one in positions} == {(1, 0)}
    _, resumed = trained(restarted(positions, 2), 24, 1, 12)
    again = [replace(position, dealing=None) for position in positions]
    _, fresh = trained(again, 24, 1, 12)
    assert resumed == fresh
    assert sorted(fresh) == list(range(24))


def test_workers_load_the_rest_of_a_pass() -> None:
    positions, first = trained([DataPosition()] * 2, 24, 2, 3, num_workers=2)
    _, rest = trained(restarted(positions, 3), 24, 2, 2, num_workers=2)
    assert sorted(first + rest) == list(range(24))


def test_a_loader_whose_dealing_is_not_known_is_refused_within_a_pass_alone() -> None:
    data = TensorDataset(torch.arange(24))
    other = DataLoader(data, 2, sampler=RandomSampler(data))
    begun = DataPosition(batches=3, batch=3, batches_per_epoch=12, resized=True)
    with pytest.raises(RecoveryError, match="does not say which samples"):
        ResumableLoader(other, begun, until_epoch=None)
    between = DataPosition(batches=12, epoch=1, batch=0, batches_per_epoch=12, resized=True)
    assert len(list(ResumableLoader(other, between, until_epoch=2))) == 12
