"""Files of the parameters outside the optimizer, on the disk and at a target."""

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from cpsr.benchmarks.harness.checkpoint_files import frozen_files
from cpsr.checkpoint import catalogue
from cpsr.checkpoint.arena import Arena
from cpsr.checkpoint.catalogue import Catalogue, Retention
from cpsr.checkpoint.commit import CommitResult
from cpsr.checkpoint.direct_file import PIECE_BYTES, write_piece
from cpsr.checkpoint.files import remove_tree
from cpsr.checkpoint.frozen_files import FrozenFiles
from cpsr.checkpoint.manifest import SLABS, FileRecord, holds_frozen, holds_weights, step_name
from cpsr.checkpoint.memory import SharedMemory
from cpsr.checkpoint.memory_states import load_states
from cpsr.checkpoint.remote.copies import scan, upload, verify
from cpsr.checkpoint.remote.place import open_place
from cpsr.checkpoint.snapshot import Snapshot, SnapshotPool
from cpsr.checkpoint.store import CheckpointStore, verify_run
from cpsr.errors import CheckpointError, RunMismatchError, SaveError
from cpsr.state.frozen_parameters import FrozenWeights
from tests.checkpoint.conftest import count_rank_manifests, make_shard, make_snapshot
from tests.device import DEVICE, cpu_only

Tensors = dict[str, torch.Tensor]
RUN = "0f" * 16


def base_weights(seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (40, 8), "layers.0": (8, 8), "layers.1": (8, 8), "scale": (), "none": (0, 3)}
    weights = {name: torch.randn(shape, generator=generator).to(DEVICE) for name, shape in shapes.items()}
    return weights | {"layers.1": weights["layers.1"].to(torch.bfloat16).t()}


class Run:
    """One rank of a run with frozen weights; each instance is a life."""

    def __init__(self, run_dir: Path, weights: Tensors, life: int = 1, rank: int = 0, ranks: int = 1) -> None:
        self.weights = weights
        self.store = CheckpointStore(run_dir, rank, ranks, RUN, life)
        if rank == 0:
            self.store.prepare()
        self.frozen = FrozenWeights(lambda: self.weights)
        self.frozen.settle()
        self.store.frozen = FrozenFiles(self.frozen, rank, self.store.directory)

    def snapshot(self, iteration: int) -> Snapshot:
        """As the training thread takes it: nobody changes what it holds."""
        taken = make_snapshot(iteration)
        state = self.frozen.state(whole=True)
        moved = {name: values.detach().cpu().clone() for name, values in state["moved"].items()}
        taken.scalars |= {"frozen": {"word": state["word"], "moved": moved}}
        return taken

    def save(self, iteration: int) -> int:
        """Save and commit; returns the bytes that were new."""
        written = self.store.write(self.snapshot(iteration))
        assert self.commit(iteration).committed
        return written

    def commit(self, iteration: int) -> CommitResult:
        return self.store.commit(iteration, 5.0, threading.Event())

    def load(self, iteration: int) -> None:
        """As a restart does."""
        assert self.store.frozen is not None
        scalars = self.store.load(iteration, make_shard(999))
        self.store.frozen.bring(scalars["frozen"])

    def files(self, iteration: int) -> dict[str, Path]:
        return {path.name: path for path in frozen_files(self.store.directory / step_name(iteration))}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path, base_weights())


def same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def spoil(path: Path) -> None:
    path.write_bytes(b"\0" * path.stat().st_size)


def test_another_life_writes_anew_what_is_damaged(run: Run, tmp_path: Path) -> None:
    """The same slab: the checkpoint before is whole again, too."""
    run.save(10)
    spoil(*run.files(10).values())
    assert {problem.iteration for problem in verify_run(tmp_path)} == {10}
    again = Run(tmp_path, base_weights(), life=2)
    again.save(20)
    assert again.files(20) == run.files(10)
    assert verify_run(tmp_path) == []


@pytest.mark.parametrize("gone", [10, 20])
def test_a_checkpoint_that_is_deleted_while_they_are_looked_for_fails_no_save(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: int
) -> None:
    for iteration in (10, 20):
        run.save(iteration)
    again = Run(tmp_path, base_weights(), life=2)

    def deleting(checkpoints: Path) -> Catalogue:
        found = catalogue.scan(checkpoints)
        remove_tree(checkpoints / step_name(gone))
        return found

    with monkeypatch.context() as patched:
        patched.setattr("cpsr.checkpoint.frozen_files.scan", deleting)
        again.store.write(again.snapshot(30))
    assert again.commit(30).committed
    assert verify_run(tmp_path) == []
    assert [info.iteration for info in again.store.catalogue()] == sorted({10, 20, 30} - {gone})


def test_they_outlive_the_checkpoint_that_wrote_them_and_count_once(run: Run, tmp_path: Path) -> None:
    costs = [run.save(iteration) for iteration in (10, 20, 30, 40)]
    kept = Retention(
        full_checkpoints=3,
        history_span_iterations=20,
        history_min_checkpoints=2,
        disk_limit_bytes=sum(costs[:3]) + 1000,  # the small state is not always as large
    )
    assert run.store.retain(kept).delete == [10]
    assert [info.iteration for info in run.store.catalogue() if info.full] == [20, 30, 40], "the limit counts them once"
    assert verify_run(tmp_path) == []
    again = Run(tmp_path, base_weights(1), life=2)
    again.load(30)
    assert same(again.weights, base_weights())


@cpu_only("of a GPU's weights a copy is written")
def test_one_that_changes_while_others_are_written_fails_the_save_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {"embed": torch.zeros(PIECE_BYTES // 4), "scale": torch.zeros(8)}
    run = Run(tmp_path, weights)

    def change(descriptor: int, piece: memoryview, path: Path) -> None:
        if "frozen" in path.name:
            weights["scale"].fill_(1)
        write_piece(descriptor, piece, path)

    with monkeypatch.context() as patched:
        patched.setattr("cpsr.checkpoint.files.write_piece", change)
        with pytest.raises(SaveError, match="'scale' outside the optimizer was written to before its values were on"):
            run.save(10)
        assert not list((run.store.directory / SLABS).glob("*frozen*"))
    run.save(20)
    again = Run(tmp_path, {name: values + 2 for name, values in weights.items()}, life=2)
    again.load(20)
    assert same(again.weights, weights)


def test_a_slab_that_is_not_seen_for_a_moment_is_not_replaced_by_some_of_its_weights(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.save(10)
    (whole,) = run.files(10).values()
    with torch.no_grad():
        run.weights["scale"].fill_(7)
    for iteration in (20, 30, 40):  # until it rests in a slab of its own
        run.save(iteration)
    assert len(run.files(40)) == 2
    exists, answers = Path.exists, [True, False]

    def answering(path: Path, **options: Any) -> bool:
        return answers.pop(0) if path == whole and answers else exists(path, **options)

    monkeypatch.setattr(Path, "exists", answering)
    with pytest.raises(SaveError, match="some of its parameters were written to since"):
        run.save(50)
    assert verify_run(tmp_path) == []
    run.save(60)
    assert run.files(60) == run.files(40)


def test_looking_for_a_snapshots_weights_keeps_the_manifest_of_one_checkpoint(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for iteration in (10, 20, 30, 40):
        run.save(iteration)
    counts = count_rank_manifests(monkeypatch)
    assert run.store.frozen is not None
    with pytest.raises(CheckpointError, match="no checkpoint of the run has those"):
        run.store.frozen.bring({"word": "0" * 32, "moved": {}})
    assert len(counts) == 4
    assert max(counts) <= 1


def test_a_weight_that_begins_to_train_makes_another_run(run: Run, tmp_path: Path) -> None:
    run.save(10)
    unfrozen = {name: values for name, values in base_weights().items() if name != "embed"}
    with pytest.raises(RunMismatchError, match=r"frozen/embed: saved was float32 of shape \(40, 8\), this job has not"):
        Run(tmp_path, unfrozen, life=2).load(10)
    with pytest.raises(RunMismatchError, match="A weight that begins or ceases to train makes another run"):
        Run(tmp_path, base_weights() | {"layers.0/weight é": torch.zeros(5)}, life=2).load(10)


@pytest.fixture
def two(tmp_path: Path) -> list[Run]:
    return [Run(tmp_path, base_weights(), rank=rank, ranks=2) for rank in range(2)]


def agree(runs: list[Run]) -> None:
    """Let two ranks agree, each in a thread."""

    class Meeting:
        def __init__(self, rank: int) -> None:
            self._rank = rank

        def all(self, condition: bool) -> bool:
            return all(self.gather(condition))

        def gather(self, value: Any) -> list[Any]:
            parts[self._rank] = value
            barrier.wait()
            gathered = list(parts)
            barrier.wait()
            return gathered

    parts: list[Any] = [None, None]
    barrier = threading.Barrier(2)

    def one(run: Run) -> None:
        group: Any = Meeting(run.store.rank)
        assert run.store.frozen is not None
        run.store.frozen.agree(group)

    threads = [threading.Thread(target=one, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_nothing_is_committed_where_a_rank_did_not_write_its_part(two: list[Run]) -> None:
    agree(two)
    two[0].store.write(two[0].snapshot(10))
    agree(two)  # nothing to agree on: both keep their parts
    two[1].store.frozen = FrozenFiles(two[1].frozen, 1, two[1].store.directory)  # it has forgotten
    two[1].store.write(two[1].snapshot(10))
    with pytest.raises(SaveError, match=r"rank 0 leaves '.*' to rank 1, which did not save rank-00001.frozen-"):
        two[0].commit(10)


# At a target


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_a_target_gets_them_once_and_again_where_they_are_damaged(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    place, sent = open_place(f"{kind}://{tmp_path / 'target'}"), list[str]()
    put = place.put

    def counted(folder: str, path: Path, record: FileRecord) -> None:
        sent.append(path.name)
        put(folder, path, record)

    (tmp_path / "run.json").write_text(json.dumps({"run_id": RUN}))
    monkeypatch.setattr(place, "put", counted)
    for iteration in (10, 20, 30):
        run.save(iteration)
        upload(place, run.store.directory / step_name(iteration), scan(place, RUN).usable)
        copies = list(scan(place, RUN).usable)
        assert [one for one in verify(place) if copies[-1] in one] == []
        if iteration == 20:
            assert sum(map(holds_frozen, sent)) == 1
            (name,) = run.files(iteration)
            place.write(copies[1], name, b"damaged")
            place.drop(copies[0])
    assert sum(map(holds_frozen, sent)) == 2
    assert sum(map(holds_weights, sent)) == 3


# In an emergency dump


def test_a_dump_has_what_moves_as_it_was_at_the_boundary(run_id: str) -> None:
    weights = base_weights()
    shard = make_shard(3, device=DEVICE)
    frozen = FrozenWeights(lambda: weights)
    frozen.settle()
    memory = SharedMemory(run_id, 0, 1)
    pool = SnapshotPool(shard, 3, memory)
    frozen.on_moved = pool.watch
    pool.mark_boundary()
    assert pool.dump(lambda: shard, 5, dict, frozen=frozen) == 5
    for _ in range(2):  # the second change is watched
        weights["embed"].add_(1)
        frozen.state(whole=False)
        pool.mark_boundary()
    expected = weights["embed"].cpu().clone()
    weights["embed"].add_(1)  # in the step that is interrupted
    assert pool.dump(lambda: shard, 6, dict, frozen=frozen) == 6
    (state,) = (one for one in Arena(run_id).list() if one.iteration == 6)
    left = load_states([state], make_shard(9))
    assert list(left["frozen"]["moved"]) == ["embed"]
    assert torch.equal(left["frozen"]["moved"]["embed"], expected)
    pool.close()
