"""Runs with checkpoints, targets that fail on demand, and the oracle that the tests of this room share."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from cpsr.checkpoint.remote.copies import scan, upload
from cpsr.checkpoint.remote.place import Place
from cpsr.checkpoint.remote.target import CheckpointTarget
from cpsr.checkpoint.store import CheckpointStore, verify_run
from cpsr.checkpoint.verify import verify_checkpoint
from cpsr.config import CheckpointConfig
from cpsr.ranks.group import Group
from tests.checkpoint.conftest import assert_same_bits, make_shard, make_snapshot

RUN = "0f" * 16
IDENTITY = {
    "run_id": RUN,
    "world_size": 1,
    "mode": "exact",
    "tensors": {"layers.0/weight é": [7, 1]},
    "engine": "torch",
    "zero_stage": 0,
    "precision": "fp32",
    "optimizer": "Adam",
    "module": "Net",
}
HANG_SECONDS = 20.0  # no test lets it hang for longer


class FaultySystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The memory file system, whose call number `fails_at` raises instead of being made, and all later ones too.

    One write into an open file is a call as well: a file may end in the middle.
    """

    protocol = "faulty"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    calls = 0
    fails_at: int | None = None
    heals = False  # later calls succeed again
    hangs_at: int | None = None
    answers = threading.Event()  # while it is not set, calls hang

    @classmethod
    def reset(cls) -> None:
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]
        cls.arm(None)

    @classmethod
    def arm(cls, fails_at: int | None, *, heals: bool = False, hangs_at: int | None = None) -> None:
        cls.calls, cls.fails_at, cls.heals, cls.hangs_at = 0, fails_at, heals, hangs_at
        cls.answers.set()

    @classmethod
    def count(cls) -> None:
        cls.calls += 1
        if cls.calls == cls.hangs_at:
            cls.answers.clear()
        assert cls.answers.wait(HANG_SECONDS)
        if cls.fails_at is not None and (cls.calls == cls.fails_at if cls.heals else cls.calls >= cls.fails_at):
            raise ConnectionError("the target does not answer")

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        self.count()
        return super().ls(path, detail, **kwargs)

    def cat_file(self, *args: Any, **kwargs: Any) -> Any:
        self.count()
        return super().cat_file(*args, **kwargs)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        try:
            self.count()
        except ConnectionError:
            super().pipe_file(path, value[: len(value) // 2], mode, **kwargs)
            raise
        super().pipe_file(path, value, mode, **kwargs)

    def mkdir(self, *args: Any, **kwargs: Any) -> None:
        self.count()
        super().mkdir(*args, **kwargs)

    def rm_file(self, path: str) -> None:
        self.count()
        super().rm_file(path)

    def rm(self, path: str, **kwargs: Any) -> None:
        for file in self.find(path):
            self.rm_file(file)
        super().rm(path, **kwargs)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        self.count()
        opened = super()._open(path, mode, **kwargs)
        if mode == "wb":
            write = opened.write

            def counted(data: bytes) -> int:
                try:
                    self.count()
                except ConnectionError:
                    write(data[: len(data) // 2])
                    raise
                return int(write(data))

            opened.write = counted
        return opened


fsspec.register_implementation("faulty", FaultySystem, clobber=True)


@pytest.fixture
def faulty() -> Iterator[type[FaultySystem]]:
    FaultySystem.reset()
    yield FaultySystem
    FaultySystem.reset()


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Two real targets; the memory one is emptied."""
    if request.param == "file":
        yield f"file://{tmp_path}/target"
        return
    _empty(MemoryFileSystem)
    yield "memory://bucket/target"
    _empty(MemoryFileSystem)


def _empty(system: Any) -> None:
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def new_run(run_dir: Path, world_size: int = 1, run_id: str = RUN, life: int = 1) -> list[CheckpointStore]:
    """A run directory with its identity, and the store of every rank."""
    run_dir.mkdir(parents=True, exist_ok=True)
    content = IDENTITY | {"run_id": run_id, "world_size": world_size}
    (run_dir / "run.json").write_text(json.dumps(content))
    stores = [CheckpointStore(run_dir, rank, world_size, run_id, life) for rank in range(world_size)]
    stores[0].prepare()
    return stores


def commit(stores: list[CheckpointStore], iteration: int) -> Path:
    """One whole checkpoint of all ranks, whose values follow from iteration and rank."""
    for rank, store in enumerate(stores):
        store.write(make_snapshot(iteration, seed=iteration + rank))
    assert stores[0].commit(iteration, 5.0, threading.Event()).committed
    return stores[0].directory / f"step-{iteration:010d}"


def send(place: Place, directory: Path) -> int:
    """Copy one checkpoint; returns its bytes."""
    return upload(place, directory)[0]


def committed_at(place: Place) -> list[int]:
    """Iterations of the copies, oldest commit first."""
    return [copy.manifest.iteration for copy in scan(place).usable]


def target_at(place: Place, run_dir: Path) -> CheckpointTarget:
    """A life's side of the target, of one rank."""
    return CheckpointTarget(CheckpointConfig(target=place.shown), run_dir, Group())


def fetched(place: Place, run_dir: Path) -> int | None:
    """What a new disk gets from the target, checked bit for bit (a run of one rank)."""
    target = target_at(place, run_dir)
    target.adopt_run()
    if not (run_dir / "run.json").exists():
        return None
    store = CheckpointStore(run_dir, 0, 1, json.loads((run_dir / "run.json").read_bytes())["run_id"], 9)
    store.prepare()
    iteration = target.fetch(store, ())
    if iteration is not None:
        assert verify_run(run_dir) == []
        assert_whole(store, iteration)
    return iteration


def assert_whole(store: CheckpointStore, iteration: int, rank: int = 0) -> None:
    """The checkpoint in the run directory is the one that was committed, bit for bit."""
    assert verify_checkpoint(store.directory / f"step-{iteration:010d}") == []
    shard = make_shard(999)
    assert store.load(iteration, shard)["step"] == iteration
    assert_same_bits(shard, make_shard(iteration + rank, iteration=iteration))
