"""Ranks of another number read their parts out of a checkpoint, and nothing else."""

import errno
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsr.benchmarks.harness.checkpoint_files import rest_file, weights_file
from cpsr.checkpoint import ranges, verify
from cpsr.checkpoint.host_snapshot import Contents
from cpsr.checkpoint.manifest import step_name
from cpsr.checkpoint.saved import SavedCheckpoint, operator_record
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore
from cpsr.elastic.resharded_load import load_tensors
from cpsr.errors import CheckpointCorruptError, CheckpointError, RunMismatchError
from cpsr.state.shard import OperatorState, ParamSlice, Shard

NEVER = threading.Event()
SHAPES = {"a.weight": (7, 5), "b.bias": (3,), "c": (11, 13), "d.scale": ()}


def whole(name: str, kind: str) -> torch.Tensor:
    seed = torch.Generator().manual_seed(hash((name, kind)) % (1 << 32))
    return torch.randn(int(torch.Size(SHAPES[name]).numel()), generator=seed)


def shard(rank: int, ranks: int, *, cuts: str = "each", filled: bool = True) -> Shard:
    """A rank's part.

    Args:
        rank: whose.
        ranks: of the job.
        cuts: `each` operator into as many ranges as there are ranks; `flat`, all operators in one flat tensor, as ZeRO
            does; or `whole` on every rank.
        filled: with the values; else zeros.
    """
    sizes = {name: int(torch.Size(shape).numel()) for name, shape in SHAPES.items()}
    total, place, operators = sum(sizes.values()), 0, {}
    for name, size in sizes.items():
        length = -(-size // ranks)
        start, stop = min(size, rank * length), min(size, (rank + 1) * length)
        if cuts == "flat":
            length = -(-total // ranks)
            start, stop = max(0, rank * length - place), min(size, (rank + 1) * length - place)
            place += size
        if cuts == "whole":
            start, stop = 0, size
        if start >= stop:
            continue
        values = {kind: whole(name, kind)[start:stop].clone() for kind in ("param", "exp_avg", "exp_avg_sq")}
        if not filled:
            values = {kind: torch.zeros_like(one) for kind, one in values.items()}
        parameter = ParamSlice(values.pop("param"), SHAPES[name], start)
        operators[name] = OperatorState(name, parameter, values, 4)
    return Shard(operators, {"seen": torch.tensor([float(rank)])})


def commit(run_dir: Path, parts: list[Shard], contents: list[Contents] | None = None) -> SavedCheckpoint:
    ranks = len(parts)
    stores = [CheckpointStore(run_dir, rank, ranks, "run", 1) for rank in range(ranks)]
    stores[0].prepare()
    for rank, (store, part) in enumerate(zip(stores, parts, strict=True)):
        snapshot = Snapshot(4, part, {"rank": rank, "tensor": torch.tensor([rank])})
        if contents is not None:
            snapshot.contents = contents[rank]
        store.write(snapshot)
    assert stores[0].commit(4, 10.0, NEVER).committed
    return SavedCheckpoint(run_dir / "checkpoints" / step_name(4))


def assert_filled(found: Shard, expected: Shard) -> None:
    for (key, one), (_, other) in zip(found.tensors(), expected.tensors(), strict=True):
        if not key.startswith("other/"):
            assert torch.equal(one, other), key


@settings(max_examples=25)
@given(
    before=st.integers(1, 5),
    after=st.integers(1, 5),
    cut_before=st.sampled_from(["each", "flat", "whole"]),
    cut_after=st.sampled_from(["each", "flat", "whole"]),
)
def test_every_rank_gets_its_part(
    tmp_path_factory: pytest.TempPathFactory, before: int, after: int, cut_before: str, cut_after: str
) -> None:
    saved = commit(tmp_path_factory.mktemp("run"), [shard(rank, before, cuts=cut_before) for rank in range(before)])
    for rank in range(after):
        into = shard(rank, after, cuts=cut_after, filled=False)
        assert load_tensors(saved, 0, into) >= sum(one.state_bytes for one in into.operators.values())
        assert_filled(into, shard(rank, after, cuts=cut_after))


def test_what_ranks_wrote_for_each_other_is_read_once(tmp_path: Path) -> None:
    alike = {name: operator_record(one).described for name, one in shard(0, 2, cuts="whole").operators.items()}
    writers = {name: index % 2 for index, name in enumerate(SHAPES)}
    contents = [
        replace(Contents(), writers={name: one for name, one in writers.items() if one != rank}, replicated=alike)
        for rank in range(2)
    ]
    saved = commit(tmp_path, [shard(rank, 2, cuts="whole") for rank in range(2)], contents)
    into = shard(2, 3, cuts="flat", filled=False)
    load_tensors(saved, 0, into)
    assert_filled(into, shard(2, 3, cuts="flat"))


def test_the_small_state_and_the_buffers_are_those_of_the_named_rank(tmp_path: Path) -> None:
    saved = commit(tmp_path, [shard(rank, 2) for rank in range(2)])
    into = shard(0, 1, filled=False)
    load_tensors(saved, 1, into)
    found = saved.small_state(1)
    assert (found["rank"], found["tensor"].tolist(), into.others["seen"].tolist()) == (1, [1], [1.0])


@pytest.mark.parametrize("damaged", [weights_file, rest_file])
def test_a_flipped_bit_is_found(tmp_path: Path, damaged: Callable[[Path, int], Path]) -> None:
    saved = commit(tmp_path, [shard(rank, 2) for rank in range(2)])
    path = damaged(saved.directory, 1)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointCorruptError, match=path.name):
        load_tensors(saved, 0, shard(0, 1, filled=False))


def test_what_the_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    parts = [shard(rank, 2) for rank in range(2)]
    del parts[1].operators["c"]
    saved = commit(tmp_path, parts)
    with pytest.raises(
        RunMismatchError,
        match=r"no rank saved elements 72 to 143 of c,.* rank 1 should have",
    ):
        load_tensors(saved, 0, shard(0, 1, filled=False))


def test_columns_are_refused_and_equal_blocks_are_taken(tmp_path: Path) -> None:
    def block(first: int, width: int) -> Shard:
        parts = shard(0, 1)
        columns = whole("c", "param").view(11, 13)[:, first : first + width].reshape(-1).clone()
        parameter = ParamSlice(columns, SHAPES["c"], first, (11, width))
        parts.operators["c"] = OperatorState("c", parameter, {}, 4)
        return parts

    saved = commit(tmp_path, [block(0, 6), block(6, 7)])
    into = block(6, 7)
    into.operators["c"].parameter.values.zero_()
    load_tensors(saved, 0, into)
    assert torch.equal(into.operators["c"].parameter.values, block(6, 7).operators["c"].parameter.values)
    with pytest.raises(RunMismatchError, match=r"no rank saved param/c .* a block of shape \(11, 5\)"):
        load_tensors(saved, 0, block(0, 5))


def test_where_whole_copies_differ_every_rank_takes_the_same(tmp_path: Path) -> None:
    """As after a flipped bit, which a commit had reported."""
    parts = [shard(rank, 2, cuts="whole") for rank in range(2)]
    parts[1].operators["c"].parameter.values.add_(1)
    saved = commit(tmp_path, parts)
    for saved_by in range(2):
        load_tensors(saved, saved_by, into := shard(0, 3, filled=False))
        assert_filled(into, shard(0, 3))


def test_a_buffer_comes_from_the_first_rank_that_has_one_like_it(tmp_path: Path) -> None:
    parts = [shard(rank, 2) for rank in range(2)]
    parts[0].others["seen"] = torch.zeros(3)
    load_tensors(commit(tmp_path, parts), 0, into := shard(0, 1, filled=False))
    assert into.others["seen"].tolist() == [1.0]


def test_a_read_that_fails_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = commit(tmp_path, [shard(0, 1)])
    monkeypatch.setattr(verify, "_PAUSES_SECONDS", (0.0,))

    def refused(size: int) -> memoryview:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(ranges, "block_buffer", refused)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(CheckpointError):
        load_tensors(saved, 0, shard(0, 2, filled=False))
    assert len(list(Path("/proc/self/fd").iterdir())) == before
