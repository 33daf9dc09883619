"""The places that one suite of promises holds, each with a way to put states there and to do harm behind its back."""

import contextlib
import errno
import itertools
import json
import os
import resource
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import pytest
import torch.distributed as dist

from cpsr.benchmarks.harness.checkpoint_files import checkpoint_files
from cpsr.checkpoint.arena import Arena, Sealed
from cpsr.checkpoint.assemble import Slab, assemble, wanted_of
from cpsr.checkpoint.buffers import HostBuffer, slab_size
from cpsr.checkpoint.catalogue import remove_unlisted
from cpsr.checkpoint.files import remove_tree
from cpsr.checkpoint.manifest import step_name
from cpsr.checkpoint.memory import SharedMemory
from cpsr.checkpoint.memory_states import MemoryState, OpenState, describe
from cpsr.checkpoint.place import Image, Index
from cpsr.checkpoint.remote.copies import fetch_parts, prepare_fetch, put_in_place, scan, upload
from cpsr.checkpoint.remote.place import Place as UrlPlace
from cpsr.checkpoint.store import CheckpointStore
from cpsr.checkpoint.tensor_file import PlacedTensor
from cpsr.errors import CheckpointError, SaveError
from cpsr.peers import transport
from cpsr.peers.peer import Peer, fetched_path
from cpsr.peers.replicator import Incoming
from cpsr.peers.transport import Channel, Kind, Message
from cpsr.ranks import group as group_module
from cpsr.ranks.group import SideGroup
from cpsr.ranks.heartbeat import HeartbeatFiles
from cpsr.state.shard import Shard
from tests.checkpoint.conftest import make_shard, make_snapshot
from tests.checkpoint.remote.conftest import Faults, commit, folder_of, new_run, overwrite, remove

RUN, OTHER = "0123abcd", "89abcdef"
SIZES = (5, 0, 400_000)  # its slab has tensors in five MiB
LIFE, BRANCH = 3, 1


class Place(Protocol):
    """Where slabs are listed, put whole, opened and dropped."""

    def list(self) -> Sequence[Index]:
        """Every slab that was put or sealed whole; by its own word, nothing is verified."""

    def put(self, name: str, image: Image) -> object:
        """Keep a slab under this name, in place of the one that has it. `list` never shows a torn or damaged one.

        Raises:
            CheckpointError: the image ended early, or its hashes do not hold, or it is of another run or rank.
            OSError: the place is full, or refuses.
        """

    def open(self, index: Index) -> Slab:
        """The slab; all that it gives is verified.

        Raises:
            CheckpointError: it is not there any more, or damaged.
        """

    def drop(self, name: str) -> None:
        """Remove a slab, if it is there."""


class Site(Protocol):
    """A place; its states are told by their iteration."""

    def put(self, iteration: int) -> None:
        """A state from elsewhere."""

    def list(self) -> list[int]:
        """All that are whole by the place's own word."""

    def load(self, iteration: int) -> Shard:
        """All of one, through `assemble`."""

    def expected(self, iteration: int) -> Shard:
        """What that must give."""

    def drop(self, iteration: int) -> None: ...

    def torn(self, iteration: int) -> Iterator[Callable[[], object]]:
        """Puts that end earlier or later, each in an error."""

    def full(self) -> contextlib.AbstractContextManager[str]:
        """Inside there is no room for a state; what the error says."""

    def damaged(self, iteration: int) -> Iterator[str]:
        """Does harm of one kind after the other to this state, and tells which; all is well again before the next."""


def sealed(arena: Arena, iteration: int, rank: int = 0) -> Sealed:
    """A state of a rank in a file of its own, as its life leaves it."""
    shard, memory = make_shard(iteration, SIZES), SharedMemory(arena.run_id, rank, LIFE, arena.directory)
    file = memory.file(str(iteration), slab_size(shard))
    views = HostBuffer(shard, pinned=False, memory=file).shard_at(iteration)
    for (_, into), (_, values) in zip(views.tensors(), shard.tensors(), strict=True):
        into.copy_(values)
    memory.branch = BRANCH
    file.seal("snapshot", views, iteration, {"step": iteration, "rng": shard.others["mask"]})
    file.close(remove=False)
    return Sealed.at(file.path, iteration)


@dataclass
class Torn:
    """An image that ends after so many of its pieces."""

    image: Image
    after: int
    error: BaseException

    @property
    def size(self) -> int:
        return self.image.size

    def pieces(self) -> Iterator[tuple[int, memoryview]]:
        for number, piece in enumerate(self.image.pieces()):
            if number == self.after:
                raise self.error
            yield piece


class SlabSite:
    """Any `Place` of slabs whose files lie in a directory of this machine.

    Args:
        place: under test.
        files: where its slabs lie.
        home: of the states that are put.
    """

    def __init__(self, place: Place, files: Arena, home: Arena) -> None:
        self.place, self.files, self.home = place, files, home
        self._images: dict[int, Sealed] = {}

    def name(self, iteration: int) -> str:
        return self.files.path(0, f"replica-00001-{iteration}").name

    def image(self, iteration: int) -> Sealed:
        if iteration not in self._images:
            self._images[iteration] = sealed(self.home, iteration)
        return self._images[iteration]

    def put(self, iteration: int) -> None:
        self.place.put(self.name(iteration), self.image(iteration))

    def index(self, iteration: int) -> Index:
        (found,) = (one for one in self.place.list() if one.iteration == iteration)
        return found

    def list(self) -> list[int]:
        return [one.iteration for one in self.place.list()]

    def load(self, iteration: int) -> Shard:
        return self.loaded(self.index(iteration))

    def loaded(self, index: Index) -> Shard:
        slab, into = self.place.open(index), make_shard(0, SIZES)
        assemble([slab], wanted_of(into), "the place")
        assert isinstance(slab, OpenState)
        assert slab.scalars()["step"] == index.iteration
        return into

    def expected(self, iteration: int) -> Shard:
        return make_shard(iteration, SIZES)

    def drop(self, iteration: int) -> None:
        self.place.drop(self.name(iteration))

    def torn(self, iteration: int) -> Iterator[Callable[[], object]]:
        image = self.image(iteration)
        for after in range(sum(1 for _ in image.pieces())):
            torn = Torn(image, after, CheckpointError("it was overwritten"))
            yield partial(self.place.put, self.name(iteration), torn)

    @contextlib.contextmanager
    def full(self) -> Iterator[str]:
        with small_files(1 << 20):
            yield "File too large"

    def damaged(self, iteration: int) -> Iterator[str]:
        path = self.files.directory / self.name(iteration)
        data, found = path.read_bytes(), describe(path)
        assert found is not None
        for label, at in _classes(data, found).items():
            path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
            yield label
        for cut in (0, 4, 8, 100, found.size.header_bytes, found.size.bytes - 1, found.size.bytes, len(data) - 1):
            path.write_bytes(data[:cut])
            yield f"cut at {cut}"
        path.write_bytes(data + bytes(4096))
        yield "longer"
        path.write_bytes(data)
        elsewhere = path.with_name("elsewhere")
        path.rename(elsewhere)
        for label, harm in _FOREIGN.items():
            harm(path, elsewhere)
            yield label
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        for label, other in {"another run's": (OTHER, 0), "another rank's": (RUN, 1)}.items():
            shutil.copy(sealed(Arena(other[0], self.home.directory), iteration, other[1]).path, path)
            yield label
        elsewhere.replace(path)
        if os.geteuid() == 0:  # others may not give files away
            os.chown(path, 1, -1)
            yield "another user's"
            os.chown(path, 0, -1)


def _classes(data: bytes, found: MemoryState) -> dict[str, int]:
    """A byte of each kind."""
    header, buffer = found.size.header_bytes, found.size.buffer_bytes
    placed = {one.name: one for one in found.header.tensors()}
    tensors = {f"{name}, in MiB {at >> 20}": at for name, one in placed.items() for at in _spread(one)}
    texts = {f"{word} in the index": data.index(word.encode()) + len(word) + 4 for word in found.index}
    names = {f"the place of {name}": data.index(json.dumps(name, ensure_ascii=False).encode()) + 2 for name in placed}
    length = {f"byte {at} of the length": at for at in range(8)}
    return (
        length
        | texts
        | names
        | {"the room of the header": header - 2, "end of the buffer": header + buffer - 1}
        | tensors
    )


def _spread(one: PlacedTensor) -> Iterator[int]:
    """The first and the last byte of a tensor, and one in each MiB."""
    yield from sorted({one.first, one.end - 1, *range(one.first, one.end, 1 << 20)} if one.end > one.first else ())


_FOREIGN: dict[str, Callable[[Path, Path], object]] = {
    "a link": lambda path, whole: path.symlink_to(whole),
    "a pipe": lambda path, _: os.mkfifo(path),
    "a directory": lambda path, _: path.mkdir(),
    "no slab": lambda path, _: path.write_bytes(b"of somebody else" * 1000),
}


@contextlib.contextmanager
def small_files(most: int) -> Iterator[None]:
    """Inside no file may have more bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def arena_site(base: Path) -> Iterator[Site]:
    """Shared memory of this machine."""
    arena = Arena(RUN, folder(base / "arena"))
    yield SlabSite(arena, arena, Arena(RUN, folder(base / "home")))


def peer_site(base: Path) -> Iterator[Site]:
    """Shared memory of another rank's machine, over gloo's own transport."""
    there, home = Arena(RUN, folder(base / "there")), Arena(RUN, folder(base / "home"))
    mine, others = _pair()
    channel, problems = Channel(mine, 1, 20.0), list[str]()
    serving = Incoming(Channel(others, 0, 20.0, serves=True), there, lambda kind, message, *_: problems.append(message))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "IDLE_SECONDS", 0.001)
        yield PeerSite(Peer(channel, home, 0), there, home)
    channel.send(Message(Kind.END))
    assert serving.join(20.0)
    mine.close()
    others.close()
    assert problems == []


class PeerSite(SlabSite):
    """The same; what is opened has left a copy here."""

    def load(self, iteration: int) -> Shard:
        copy = fetched_path(self.home, 0, self.index(iteration))
        try:
            return super().load(iteration)
        finally:
            copy.unlink(missing_ok=True)


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def _pair() -> list[SideGroup]:
    """The two sides of a group whose ranks are threads of this process."""
    store, groups = dist.HashStore(), dict[int, SideGroup]()  # type: ignore[attr-defined] # torch exports it unsaid

    def connect(rank: int) -> None:
        groups[rank] = SideGroup("pair", [0, 1], 20.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_module, "_get_default_store", lambda: store)
        patch.setattr(dist, "get_rank", lambda: int(threading.current_thread().name))
        threads = [threading.Thread(target=connect, args=(rank,), name=str(rank)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [groups[0], groups[1]]


class RunSite:
    """The directory of a run; each put is a life of its own, as of a job that was started anew."""

    def __init__(self, base: Path) -> None:
        self._run, self._lives = base / "run", itertools.count(1)
        self._store()  # makes it

    def _store(self) -> CheckpointStore:
        life = next(self._lives)
        HeartbeatFiles(self._run, life).claim()
        store = CheckpointStore(self._run, 0, 1, RUN, life)
        if life == 1:
            store.prepare()
        return store

    def directory(self, iteration: int) -> Path:
        return self._run / "checkpoints" / step_name(iteration)

    def put(self, iteration: int) -> None:
        store = self._store()
        store.quarantine(iteration, "a test")  # the one before, if there is one
        store.write(make_snapshot(iteration, seed=iteration))
        if not (result := store.commit(iteration, 1.0, threading.Event())).committed:
            raise SaveError(result.reason)

    def list(self) -> list[int]:
        return [info.iteration for info in CheckpointStore(self._run, 0, 1, RUN, 0).catalogue()]

    def load(self, iteration: int) -> Shard:
        into = make_shard(0)
        assert CheckpointStore(self._run, 0, 1, RUN, 0).load(iteration, into)["step"] == iteration
        return into

    def expected(self, iteration: int) -> Shard:
        return make_shard(iteration)

    def drop(self, iteration: int) -> None:
        store = CheckpointStore(self._run, 0, 1, RUN, 0)
        if self.directory(iteration).exists():
            remove_tree(self.directory(iteration))
        remove_unlisted(store.directory)

    def torn(self, iteration: int) -> Iterator[Callable[[], object]]:
        """The disk fails at one call after the other."""
        calls = self._failing_at(iteration, 0)
        self.drop(iteration)
        for number in range(1, calls + 1):
            yield partial(self._failing_at, iteration, number)

    def _failing_at(self, iteration: int, number: int) -> int:
        calls = 0

        def failing(real: Callable[..., object], *args: object, **options: object) -> object:
            nonlocal calls
            calls += 1
            if calls == number:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*args, **options)

        with pytest.MonkeyPatch.context() as patch:
            for name in ("fsync", "replace", "write"):
                patch.setattr(os, name, partial(failing, getattr(os, name)))
            self.put(iteration)
        return calls

    @contextlib.contextmanager
    def full(self) -> Iterator[str]:
        with small_files(4000):  # less than the largest slab
            yield "File too large"

    def damaged(self, iteration: int) -> Iterator[str]:
        for path in checkpoint_files(self.directory(iteration)):
            data, elsewhere = path.read_bytes(), path.with_name("elsewhere")
            for at in (0, 8, len(data) // 2, len(data) - 1):
                path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
                yield f"byte {at} of {path.name}"
            for content in (b"", data[: len(data) // 2], data + b"0"):
                path.write_bytes(content)
                yield f"{path.name} of {len(content)} bytes"
            path.write_bytes(data)
            path.rename(elsewhere)
            yield f"no {path.name}"
            for label, harm in _FOREIGN.items():
                harm(path, elsewhere)
                yield f"{label} for {path.name}"
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
            elsewhere.replace(path)


class UrlSite:
    """Copies of checkpoints at a URL; what is fetched from there is read from the disk."""

    def __init__(self, place: UrlPlace, base: Path) -> None:
        self.place, self._base, self._stores = place, base, new_run(base / "run")
        self._committed: dict[int, Path] = {}
        self._committing = threading.Lock()  # several threads put; one rank saves one checkpoint after the other
        self._faults = Faults(place)

    def directory(self, iteration: int) -> Path:
        with self._committing:
            if iteration not in self._committed:
                self._committed[iteration] = commit(self._stores, iteration)
            return self._committed[iteration]

    def put(self, iteration: int) -> None:
        upload(self.place, self.directory(iteration))

    def list(self) -> list[int]:
        return sorted(manifest.iteration for manifest in scan(self.place).usable.values())

    def load(self, iteration: int) -> Shard:
        run = self._base / "fetched"
        shutil.rmtree(run, ignore_errors=True)
        (store,), where = new_run(run), folder_of(self.place, iteration)
        prepare_fetch(store, iteration)
        fetch_parts(self.place, where, store, 0, 1)
        assert put_in_place(self.place, where, store) == iteration
        into = make_shard(0)
        assert store.load(iteration, into)["step"] == iteration
        return into

    def expected(self, iteration: int) -> Shard:
        return make_shard(iteration)

    def drop(self, iteration: int) -> None:
        self.place.drop(folder_of(self.place, iteration))

    def torn(self, iteration: int) -> Iterator[Callable[[], object]]:
        self.directory(iteration)
        whole = Faults(self.place)
        self.put(iteration)
        self.place.system = self._faults
        self.drop(iteration)
        for call in range(1, whole.calls + 1, 5):

            def put(call: int = call) -> None:
                self._faults.arm(call)
                try:
                    self.put(iteration)
                finally:
                    self._faults.arm()

            yield put

    @contextlib.contextmanager
    def full(self) -> Iterator[str]:
        self._faults.free_bytes = 4000  # less than the largest file
        yield "No space left on device"
        self._faults.free_bytes = None

    def damaged(self, iteration: int) -> Iterator[str]:
        where = folder_of(self.place, iteration)
        for file in self.place.list(where):
            data = self.place.read(where, file)
            for at in (0, len(data) // 2, len(data) - 1):
                overwrite(self.place, where, file, data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :])
                yield f"byte {at} of {file}"
            for content in (data[: len(data) // 2], data + b"0"):
                overwrite(self.place, where, file, content)
                yield f"{file} of {len(content)} bytes"
            remove(self.place, where, file)
            yield f"no {file}"
            overwrite(self.place, where, file, data)
