"""Shards and stores that the tests of this room share."""

import errno
import gc
import os
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cpsr.checkpoint import saved, verify
from cpsr.checkpoint.files import read_bytes
from cpsr.checkpoint.host_snapshot import WHOLE, Contents
from cpsr.checkpoint.manifest import RankManifest
from cpsr.checkpoint.memory_owners import remove_memory_states
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore
from cpsr.state.shard import OperatorState, ParamSlice, Shard
from tests.device import DEVICE


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is a tmpfs: what is written is forced to the disk, each file and each name by itself."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.fixture
def run_id() -> Iterator[str]:
    """A run whose shared memory is freed at the end."""
    name = f"test-{uuid.uuid4().hex}"
    yield name
    remove_memory_states(name)


# A checkpoint's directory, and how often reading there is refused.
RefuseReading = Callable[[Path, int], None]
_STAT = os.stat


def make_shard(seed: int = 0, sizes: tuple[int, ...] = (5, 0, 300), iteration: int = 0, device: str = "cpu") -> Shard:
    """Operators as ZeRO lays them out: contiguous slices of one flat tensor each for weights and moments."""
    generator = torch.Generator().manual_seed(seed)
    kinds = ("param", "exp_avg", "exp_avg_sq")
    flat = {kind: torch.randn(sum(sizes), generator=generator).to(device) for kind in kinds}
    operators, start = {}, 0
    for index, size in enumerate(sizes):
        piece = {kind: values[start : start + size] for kind, values in flat.items()}
        name = f"layers.{index}/weight é"
        parameter = ParamSlice(piece.pop("param"), (size + 2, 1), 1)
        operators[name] = OperatorState(name, parameter, piece, iteration)
        start += size
    others = {
        "norm.count": torch.tensor(seed),
        "norm.mean": torch.randn(3, 2, generator=generator).to(torch.bfloat16),
        "mask": torch.rand(4, generator=generator) > 0.5,
    }
    return Shard(operators, {name: values.to(device) for name, values in others.items()})


def live_shard(seed: int = 0, sizes: tuple[int, ...] = (5, 0, 300), iteration: int = 0) -> Shard:
    """The same as an engine has it, on the device that is trained on."""
    return make_shard(seed, sizes, iteration, DEVICE)


def make_snapshot(iteration: int, seed: int | None = None, sizes: tuple[int, ...] = (5, 0, 300)) -> Snapshot:
    """A snapshot outside any pool whose values follow from its iteration."""
    scalars = {
        "step": iteration,
        "cumulative_learning_rate": iteration * 1e-3,
        "learning_rate": 1e-3,
        "origin": "trained",
        "rng": torch.arange(iteration % 50),
        "nan": float("nan"),
    }
    return Snapshot(iteration, make_shard(iteration if seed is None else seed, sizes, iteration), scalars)


def assert_same_bits(found: Shard, expected: Shard) -> None:
    """Every byte of every tensor (NaN included)."""
    left, right = dict(found.tensors()), dict(expected.tensors())
    assert left.keys() == right.keys()
    for key, tensor in left.items():
        assert tensor.dtype == right[key].dtype, key
        assert tensor.shape == right[key].shape, key
        assert torch.equal(bits(tensor), bits(right[key])), key


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def save(store: CheckpointStore, iteration: int, contents: Contents = WHOLE) -> None:
    """One complete save of a single-rank store."""
    snapshot = make_snapshot(iteration)
    snapshot.contents = contents
    store.write(snapshot)
    assert store.commit(iteration, 5.0, threading.Event()).committed


def refuse_asking(monkeypatch: pytest.MonkeyPatch, refused: Path, times: int) -> None:
    """Let the next questions for a file fail as a network's file system does, without the pauses between them."""
    monkeypatch.setattr(verify, "_PAUSES_SECONDS", (0.0, 0.0, 0.0))
    left = [times]

    def refusing(path: Any, **options: Any) -> os.stat_result:
        if path == refused and left[0]:
            left[0] -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return _STAT(path, **options)

    monkeypatch.setattr(os, "stat", refusing)


def rank_manifests() -> int:
    """How many ranks' manifests are in memory."""
    gc.collect()
    return sum(type(one) is RankManifest for one in gc.get_objects())


def count_rank_manifests(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets, whenever a rank's manifest is read, how many more than now are in memory then."""
    before, found, read = rank_manifests(), list[int](), verify.read_rank_manifest

    def counting(*args: Any) -> RankManifest:
        found.append(rank_manifests() - before)
        return read(*args)

    monkeypatch.setattr(saved, "read_rank_manifest", counting)
    return found


@pytest.fixture
def refuse_reading(monkeypatch: pytest.MonkeyPatch) -> RefuseReading:
    """Makes the next reads of a manifest fail as those of a bad disk do, without the pauses between them."""
    monkeypatch.setattr(verify, "_PAUSES_SECONDS", (0.0, 0.0, 0.0))

    def refuse(directory: Path, times: int) -> None:
        left = [times]

        def refusing(path: Path) -> bytes:
            if path.parent == directory and left[0]:
                left[0] -= 1
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return read_bytes(path)

        monkeypatch.setattr(verify, "read_bytes", refusing)

    return refuse


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """A single-rank store."""
    store = CheckpointStore(tmp_path, 0, 1, "run", 1)
    store.prepare()
    return store
