"""Checkpoints for which ranks that hold the same write one part of it each."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cpsr.benchmarks.harness.checkpoint_files import edit_part, rest_file, slices_in, weights_file
from cpsr.checkpoint.commit import CommitResult
from cpsr.checkpoint.history import DiskHistory
from cpsr.checkpoint.host_snapshot import WHOLE, Contents
from cpsr.checkpoint.saved import fingerprint, operator_record
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore, verify_run
from cpsr.errors import CheckpointCorruptError, SaveError
from cpsr.state.shard import Shard
from tests.checkpoint.conftest import assert_same_bits, make_shard, make_snapshot

NEVER = threading.Event()
SIZES = (5, 0, 300, 7, 7, 9)
NAMES = [f"layers.{index}/weight é" for index in range(len(SIZES))]
# Each is written by the rank of its turn; the last two are experts.
WRITERS = {name: index % 2 for index, name in enumerate(NAMES)}
Ranks = tuple[CheckpointStore, CheckpointStore]


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    """The stores of two ranks of one run."""
    found = tuple(CheckpointStore(tmp_path, rank, 2, "run", 1) for rank in range(2))
    found[0].prepare()
    return found[0], found[1]


def replicated(rank: int, contents: Contents = WHOLE, writers: Mapping[str, int] = WRITERS) -> Contents:
    """What a rank's part holds where the two ranks write for each other."""
    alike = {name: operator_record(one).described for name, one in make_shard(sizes=SIZES).operators.items()}
    others = {name: writer for name, writer in writers.items() if writer != rank}
    return replace(contents, writers=others, replicated=alike)


def snapshot(iteration: int, rank: int, writers: Mapping[str, int] = WRITERS) -> Snapshot:
    found = make_snapshot(iteration, sizes=SIZES)
    found.contents = replicated(rank, writers=writers)
    return found


def commit(ranks: Ranks, iteration: int, make: Callable[[int], Snapshot] | None = None) -> CommitResult:
    for store in reversed(ranks):
        store.write(snapshot(iteration, store.rank) if make is None else make(store.rank))
    return ranks[0].commit(iteration, 5.0, NEVER)


def loaded(store: CheckpointStore, iteration: int) -> Shard:
    into = make_shard(999, SIZES)
    store.load(iteration, into)
    return into


def directory(store: CheckpointStore, iteration: int) -> Path:
    return store.directory / f"step-{iteration:010d}"


def test_each_rank_comes_back_whole_from_what_both_wrote(ranks: Ranks, tmp_path: Path) -> None:
    assert commit(ranks, 10).committed
    for store in ranks:
        assert_same_bits(loaded(store, 10), make_shard(10, SIZES))
    assert verify_run(tmp_path) == []


@pytest.mark.parametrize("damaged", [weights_file, rest_file])
@pytest.mark.parametrize("reader", [0, 1])
def test_damage_in_a_file_is_damage_for_each_rank_that_needs_it(
    ranks: Ranks, damaged: Callable[[Path, int], Path], reader: int
) -> None:
    assert commit(ranks, 10).committed
    path = damaged(directory(ranks[0], 10), 1)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointCorruptError, match=path.name):
        ranks[reader].load(10, make_shard(999, SIZES))
    checkpoints = ranks[reader].directory
    excluded = DiskHistory(checkpoints, slices_in(checkpoints, reader)).excluded
    assert (10 in excluded) == (damaged is weights_file)


def test_nothing_is_committed_that_nobody_wrote(ranks: Ranks) -> None:
    both = {**WRITERS, NAMES[2]: 1}  # rank 1 thinks that rank 0 writes it, and rank 0 that rank 1 does
    with pytest.raises(SaveError, match=r"rank 0 leaves 'layers\.2/weight é' of iteration 10 to rank 1"):
        commit(ranks, 10, lambda rank: snapshot(10, rank, writers=both if rank == 0 else WRITERS))
    assert ranks[0].catalogue() == []
    assert ranks[0].drifted is None


def test_a_manifest_that_leaves_to_others_what_they_did_not_write_is_damage(ranks: Ranks, tmp_path: Path) -> None:
    """Whoever forged it: a restart must not take what is not there for zeros, or for another operator."""
    assert commit(ranks, 10).committed
    folder = directory(ranks[0], 10)
    for writer in (1, 7):

        def leave(part: dict[str, Any], writer: int = writer) -> None:
            part["operators"][NAMES[0]]["saved_by"] = writer

        edit_part(folder, leave)
        with pytest.raises(CheckpointCorruptError, match=rf"rank.0*{writer}"):
            loaded(ranks[0], 10)
        assert any(f"to rank {writer}" in problem.what for problem in verify_run(tmp_path))


def test_a_fingerprint_distinguishes_weights_moments_and_slices() -> None:
    source = make_shard(3, iteration=7)
    found = fingerprint(source.operators.values(), values=True)
    assert fingerprint(make_shard(3, iteration=8).operators.values(), values=True) == found
    name, operator = next(iter(source.operators.items()))
    moved = replace(operator, parameter=replace(operator.parameter, offset=operator.parameter.offset + 1))
    assert fingerprint({**source.operators, name: moved}.values(), values=True) != found
    for _, values in Shard(source.operators).tensors():
        if values.numel():
            values.view(torch.uint8)[-1] ^= 1
            assert fingerprint(source.operators.values(), values=True) != found
            values.view(torch.uint8)[-1] ^= 1
    assert fingerprint(source.operators.values(), values=True) == found
