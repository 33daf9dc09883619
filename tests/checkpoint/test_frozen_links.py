"""States of ranks that are gone, made a checkpoint with the frozen weights that another checkpoint has."""

from pathlib import Path

import pytest
import torch

from cpsr.checkpoint.manifest import step_name
from cpsr.checkpoint.store import verify_run
from cpsr.errors import SaveError
from tests.checkpoint.conftest import make_shard
from tests.checkpoint.frozen_ranks import Life, Tensors, base


def restored(run_dir: Path, iteration: int, ranks: int = 1, rank: int = 0) -> Tensors:
    """What a job that has loaded other weights gets of a checkpoint."""
    life = Life(run_dir, [base(9)] * ranks, life=5)
    scalars = life.stores[rank].load(iteration, make_shard(99))
    life.files[rank].bring(scalars["frozen"])
    return life.weights[rank]


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("shared", [True, False])
def test_the_files_of_a_checkpoint_are_linked(tmp_path: Path, parts: int, shared: bool) -> None:
    """Also those that other ranks wrote, by the only part of a checkpoint of what all ranks held."""
    life = Life(tmp_path, [base() for _ in range(3)])
    life.save(10, shared=shared)
    other = Life(tmp_path, [base(1)], life=2).files[0]
    life.rescue([life.snapshot(14, rank) for rank in range(parts)], 3, other)
    linked, before = set(life.inodes(14).values()), set(life.inodes(10).values())
    assert linked == before if shared or parts == 3 else linked < before
    assert verify_run(tmp_path) == []
    for rank in range(parts):
        assert same(restored(tmp_path, 14, parts, rank), base())


def test_without_a_checkpoint_other_weights_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    life = Life(tmp_path, [base(), base()])
    other = Life(tmp_path, [base(1)], life=2).files[0]
    with pytest.raises(SaveError, match="this job has others than they were with the state"):
        life.rescue([life.snapshot(4)], 2, other)
    assert list((life.directory / step_name(4)).iterdir()) == []
    assert same(dict(other.weights.tensors), base(1))


@pytest.mark.parametrize("own", [0, 1])
def test_a_file_that_is_gone_or_damaged_is_not_linked(tmp_path: Path, own: int) -> None:
    """A job that has the same weights writes them anew; the other refuses the state, and the log names the file."""
    life = Life(tmp_path, [base(), base()])
    life.save(10)
    name = max(life.inodes(10))
    path = life.directory / step_name(10) / name
    path.write_bytes(b"\0" * path.stat().st_size)
    other = Life(tmp_path, [base(own)], life=2).files[0]
    if own == 0:
        life.rescue([life.snapshot(14)], 2, other)
        assert same(restored(tmp_path, 14), base())
        return
    with pytest.raises(SaveError, match="no checkpoint of the run has the parameters outside the optimizer of rank 0"):
        life.rescue([life.snapshot(14)], 2, other)
