"""Runs with checkpoints, places of three kinds, faults in front of any of them, and the oracle of this room's tests."""

import errno
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from cpsr.benchmarks.harness.checkpoint_files import Kind, slab_names
from cpsr.checkpoint.manifest import RankManifest, rank_manifest_name
from cpsr.checkpoint.remote import target as target_module
from cpsr.checkpoint.remote.copies import read_copy, scan, upload
from cpsr.checkpoint.remote.place import Place, open_place
from cpsr.checkpoint.remote.target import CheckpointTarget, Report
from cpsr.checkpoint.store import CheckpointStore, verify_run
from cpsr.checkpoint.verify import verify_checkpoint
from cpsr.config import CheckpointConfig
from cpsr.ranks.group import Group
from tests.checkpoint.conftest import assert_same_bits, make_shard, make_snapshot

RUN = "0f" * 16
OTHER_RUN = "ab" * 16
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
START_SECONDS = 30.0
KINDS = ["file", "memory", pytest.param("s3", marks=pytest.mark.slow)]
_numbers = itertools.count()


class Faults:
    """In front of a place's file system: a call that fails, hangs or does something else before, or a full disk.

    Every call that is made of it counts, from 1 on. A file that a failing call writes ends in the middle.
    """

    def __init__(self, place: Place) -> None:
        self.system = place.system
        self.calls = 0
        self.fails_at: int | None = None
        self.heals = False  # later calls succeed again
        self.before: dict[int, Callable[[], object]] = {}
        self.free_bytes: int | None = None
        self.answers = threading.Event()  # while it is not set, calls hang
        self.answers.set()
        place.system = self

    def arm(self, fails_at: int | None = None, *, heals: bool = False, before: dict[int, Any] | None = None) -> None:
        self.calls, self.fails_at, self.heals, self.before = 0, fails_at, heals, before or {}
        self.answers.set()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.system, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            number = self.calls
            if number in self.before:
                self.before.pop(number)()
            assert self.answers.wait(HANG_SECONDS)
            if self.fails_at is not None and (number == self.fails_at if self.heals else number >= self.fails_at):
                self._half(name, *args)
                raise ConnectionError("the target does not answer")
            if self.free_bytes is not None and (written := self._written(name, *args)) is not None:
                if len(written) > self.free_bytes:
                    self._half(name, *args)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self.free_bytes -= len(written)
            return call(*args, **kwargs)

        return counted

    @staticmethod
    def _written(name: str, *args: Any) -> bytes | None:
        if name == "put_file":
            return Path(args[0]).read_bytes()
        return args[1] if name == "pipe_file" else None

    def _half(self, name: str, *args: Any) -> None:
        if (written := self._written(name, *args)) is not None:
            self.system.pipe_file(args[1] if name == "put_file" else args[0], written[: len(written) // 2])


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """Address of a server of the S3 protocol (moto's, of the extra `dev`)."""
    pytest.importorskip("moto.server", reason="the S3 server of the tests: pip install 'cpsr[dev]'")
    pytest.importorskip("s3fs", reason="pip install 'cpsr[s3]'")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < deadline, "the server does not start"
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def bucket(s3: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new bucket; credentials and address come from the environment, as a user's do."""
    import s3fs

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    name = f"bucket-{next(_numbers)}"
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(name)
    return name


def empty_url(kind: str, request: pytest.FixtureRequest) -> str:
    """A place of this kind that nobody has written to."""
    if kind == "file":
        return f"file://{request.getfixturevalue('tmp_path')}/target"
    if kind == "s3":
        return f"s3://{request.getfixturevalue('bucket')}/runs/gpt"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    return "memory://bucket/target"


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest) -> Place:
    """One of each kind, empty."""
    return open_place(empty_url(request.param, request))


@pytest.fixture
def memory(request: pytest.FixtureRequest) -> Place:
    """An empty one in memory, for what does not depend on the kind."""
    return open_place(empty_url("memory", request))


@pytest.fixture
def local(request: pytest.FixtureRequest) -> Place:
    """An empty one on this machine."""
    return open_place(empty_url("file", request))


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


def copied_run(run_dir: Path, place: Place, iterations: tuple[int, ...] = (10, 20)) -> CheckpointStore:
    """A run whose checkpoints are all at the target."""
    stores = new_run(run_dir)
    for iteration in iterations:
        upload(place, commit(stores, iteration))
    return stores[0]


def committed_at(place: Place) -> list[int]:
    """Iterations of the copies, oldest commit first."""
    return [manifest.iteration for manifest in scan(place).usable.values()]


def folder_of(place: Place, iteration: int) -> str:
    """Where the copy of a checkpoint lies."""
    return next(folder for folder, manifest in scan(place).usable.items() if manifest.iteration == iteration)


def overwrite(place: Place, folder: str, file: str, data: bytes) -> None:
    """Put something else in the place of a file there."""
    system, path = fsspec.core.url_to_fs(place.name(folder, file), skip_instance_cache=True)
    system.pipe_file(path, data)


def damage(place: Place, folder: str, kind: Kind, rank: int = 0) -> str:
    """Put something else in the place of a rank's file of this kind; its name."""
    name = rank_manifest_name(rank, read_copy(place, folder).save)
    record = RankManifest.parse(place.read(folder, name))
    file = max(slab_names(record, kind))
    overwrite(place, folder, file, b"damaged")
    return file


def remove(place: Place, folder: str, file: str) -> None:
    """Remove one file there."""
    system, path = fsspec.core.url_to_fs(place.name(folder, file), skip_instance_cache=True)
    system.rm_file(path)


def target_at(place: Place, run_dir: Path, keep: int = 2, timeout_seconds: float = 600.0) -> CheckpointTarget:
    """A life's side of the target, of one rank."""
    config = CheckpointConfig(target=place.shown, target_keep_checkpoints=keep, save_timeout_seconds=timeout_seconds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target_module, "open_place", lambda url, run_dir: place)
        return CheckpointTarget(config, run_dir, Group())


def copy_newest(place: Place, store: CheckpointStore, keep: int = 2) -> list[Report]:
    """One life that copies the newest checkpoint, and what it reports."""
    target = target_at(place, store.directory.parent, keep)
    target.start(store)
    target.notify(store.catalogue()[-1].iteration)
    target.close(HANG_SECONDS)
    return target.reports()


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
