"""Ways to bring the files of one committed checkpoint into an object store, with and without reading them back."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import psutil
import torch
import xxhash

from cpsr.benchmarks.harness.processes import in_own_process
from cpsr.benchmarks.upload.server import BUCKET
from cpsr.checkpoint.files import hash_file
from cpsr.checkpoint.manifest import COMMIT
from cpsr.checkpoint.remote.catalogue import verify
from cpsr.checkpoint.remote.identity import Identity
from cpsr.checkpoint.remote.place import open_place
from cpsr.checkpoint.remote.requests import options_for, send_parts
from cpsr.checkpoint.remote.upload import upload
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.checkpoint.store import CheckpointStore
from cpsr.errors import CPSRError
from cpsr.state.shard import OperatorState, ParamSlice, Shard

__all__ = ["CPSR", "DEFAULTS", "SETTINGS", "TUNED", "Cost", "Setting", "Ways", "committed"]

CPSR, DEFAULTS, TUNED = "cpsr", "s3fs, its defaults", "s3fs, tuned"
OPERATORS = 50
TENSORS = 3  # weights and two moments, in fp32
MEBIBYTE = 1 << 20
COMMIT_SECONDS = 60.0
RUN = "0f" * 16


@dataclass(frozen=True)
class Cost:
    """What one copy took.

    Attributes:
        seconds: until it was at the store, and, where it is, read back and compared.
        processor_seconds: of this process.
        server_seconds: processor time of the store's process.
    """

    seconds: float
    processor_seconds: float
    server_seconds: float


@dataclass(frozen=True)
class Setting:
    """How s3fs is told to send and read.

    Attributes:
        chunk_mebibytes: of one part.
        concurrency: parts of one file at a time.
    """

    chunk_mebibytes: int
    concurrency: int

    def arguments(self) -> dict[str, int]:
        """Of `put` and `cat`."""
        return {"chunksize": self.chunk_mebibytes * MEBIBYTE, "max_concurrency": self.concurrency}


SETTINGS = tuple(Setting(chunk, concurrency) for chunk in (16, 32, 64) for concurrency in (4, 10))


def committed(directory: Path, megabytes: int) -> Path:
    """A committed checkpoint of so many megabytes (10^6 bytes) of state in an empty directory.

    Raises:
        CPSRError: it was not committed.
    """
    elements = megabytes * 10**6 // (TENSORS * 4 * OPERATORS)
    operators = {}
    for index in range(OPERATORS):
        weights, *moments = (torch.randn(elements) for _ in range(TENSORS))
        name = f"layers.{index:02d}.weight"
        named = dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))
        operators[name] = OperatorState(name, ParamSlice(weights, (elements,)), named, 0)
    shard = Shard(operators)
    pool = SnapshotPool(shard)
    store = CheckpointStore(directory, 0, 1, RUN, 1)
    store.prepare()
    try:
        pool.begin(shard, 1, {"cumulative_learning_rate": 0.0, "learning_rate": 0.1})
        snapshot = pool.finish()
        assert snapshot is not None
        pool.settle()
        store.write(snapshot)
        if not store.commit(1, COMMIT_SECONDS, threading.Event()).committed:
            raise CPSRError("the checkpoint was not committed")
    finally:
        pool.close()
    return store.directory / "step-0000000001"


class Ways:
    """One checkpoint, and each way to copy it.

    Args:
        checkpoint: of `committed`.
        server_seconds: processor time of the store's process so far.
    """

    def __init__(self, checkpoint: Path, server_seconds: Callable[[], float]) -> None:
        import s3fs

        self._checkpoint = checkpoint
        self._server_seconds = server_seconds
        self._files = sorted(checkpoint.glob("*.safetensors"))
        self._hashes = [hash_file(path).xxh3_128 for path in self._files]
        self.bytes = sum(path.stat().st_size for path in self._files)
        self._place = open_place(f"s3://{BUCKET}/cpsr")
        self._identity = Identity(
            run_id=RUN, world_size=1, tensors={}, zero_stage=0, precision="fp32", optimizer="Adam"
        )
        self._s3: Any = s3fs.S3FileSystem(skip_instance_cache=True)
        self._setting = SETTINGS[0]
        self.verified: Mapping[str, Callable[[], Cost]] = {
            CPSR: self._cpsr,
            DEFAULTS: lambda: self._timed(self._put, self._compare),
            TUNED: lambda: self._timed(self._put_tuned, self._compare_tuned),
        }
        self.sent: Mapping[str, Callable[[], Cost]] = {
            CPSR: lambda: self._timed(self._send),
            DEFAULTS: lambda: self._timed(self._put),
            TUNED: lambda: self._timed(self._put_tuned),
        }

    def tune(self, settings: Sequence[Setting] = SETTINGS, times: int = 2) -> Setting:
        """Find and keep the setting with which s3fs sends and reads back fastest; the best of so many times each."""
        seconds = {}
        for setting in settings:
            self._setting = setting
            seconds[setting] = min(self.verified[TUNED]().seconds for _ in range(times))
        return self.use(min(seconds, key=seconds.__getitem__))

    def use(self, setting: Setting) -> Setting:
        """Take a setting that was found before."""
        self._setting = setting
        return setting

    def check(self) -> None:
        """Read what the product has left at the store once more.

        Raises:
            CPSRError: it is not what was committed.
        """
        if problems := verify(self._place):
            raise CPSRError(f"the copy is damaged: {problems}")

    def peak_bytes(self, name: str) -> int:
        """Most memory that one verified copy takes in a new process, beyond what the process had before."""
        return in_own_process(_peak, self._checkpoint, name, self._setting)

    def _cpsr(self) -> Cost:
        self._place.remove(self._checkpoint.name, first=COMMIT)  # each checkpoint of a run has a folder of its own
        return self._timed(self._upload)

    def _upload(self) -> None:
        upload(self._place, self._checkpoint, self._identity, lambda: False)

    def _send(self) -> None:
        """The product's sending alone: without its protocol, and nothing is read back."""
        url = f"s3://{BUCKET}/sent"
        system, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, **options_for(url))

        async def send() -> None:
            with contextlib.ExitStack() as opened:
                files = [(path, opened.enter_context(path.open("rb")).fileno()) for path in self._files]
                sizes = [path.stat().st_size for path in self._files]
                sending = [
                    send_parts(system, descriptor, f"{root}/{path.name}", size, lambda: None)
                    for (path, descriptor), size in zip(files, sizes, strict=True)
                ]
                await asyncio.gather(*sending)

        asyncio.run_coroutine_threadsafe(send(), system.loop).result()

    def _put(self) -> None:
        for path in self._files:
            self._s3.put_file(str(path), _key(path))

    def _compare(self) -> None:
        for path, expected in zip(self._files, self._hashes, strict=True):
            _refuse(self._s3.cat_file(_key(path)), expected)

    def _put_tuned(self) -> None:
        """All files at the same time, each in parts at the same time."""
        local, keys = [str(path) for path in self._files], [_key(path) for path in self._files]
        self._s3.put(local, keys, **self._setting.arguments())

    def _compare_tuned(self) -> None:
        found = self._s3.cat([_key(path) for path in self._files], **self._setting.arguments())
        for path, expected in zip(self._files, self._hashes, strict=True):
            _refuse(found[_key(path)], expected)

    def _timed(self, *work: Callable[[], None]) -> Cost:
        server, processor, started = self._server_seconds(), time.process_time(), time.perf_counter()
        for one in work:
            one()
        seconds, processor = time.perf_counter() - started, time.process_time() - processor
        return Cost(seconds, processor, self._server_seconds() - server)


def _peak(checkpoint: Path, name: str, setting: Setting) -> int:
    ways = Ways(checkpoint, lambda: 0.0)
    ways.use(setting)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    before = psutil.Process().memory_info().rss
    ways.verified[name]()
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(peak.split()[1]) * 1024 - before


def _key(path: Path) -> str:
    return f"{BUCKET}/s3fs/{path.name}"


def _refuse(data: bytes, expected: str) -> None:
    if xxhash.xxh3_128_hexdigest(data) != expected:
        raise CPSRError("what s3fs read back differs from what it has sent")
