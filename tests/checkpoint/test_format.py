"""A reader of checkpoints that knows docs/format.md alone, and nothing of CPSR."""

import hashlib
import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load

from cpsr.checkpoint.host_snapshot import Contents
from cpsr.checkpoint.saved import operator_record
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore
from cpsr.state.shard import OperatorState, ParamSlice, Shard

MIB = 1 << 20


def read(path: Path, wanted: str) -> bytes:
    """A file whose SHA-256, or hash of the hashes of its MiB, is `wanted`."""
    data = path.read_bytes()
    pieces = b"".join(xxhash.xxh3_64_digest(data[start : start + MIB]) for start in range(0, len(data), MIB))
    if wanted not in (hashlib.sha256(data).hexdigest(), xxhash.xxh3_128_hexdigest(pieces)):
        raise ValueError(f"{path.name} is damaged")
    return data


def parameter(checkpoint: Path, key: str) -> torch.Tensor:
    """A whole parameter, or moment, out of all ranks' pieces."""
    word, _, listed = (checkpoint / "COMMIT").read_bytes().partition(b"\n")
    if word != hashlib.sha256(listed).hexdigest().encode():
        raise ValueError("COMMIT is damaged")
    manifest = json.loads(listed)
    names = {
        rank: checkpoint / f"rank-{int(rank):05d}-{manifest['life']}.{manifest['attempt']}.json"
        for rank in manifest["ranks"]
    }
    ranks = {rank: json.loads(read(names[rank], one["sha256"])) for rank, one in manifest["ranks"].items()}
    kind, name = key.split("/")[0] + "s", key.split("/")[-1]
    whole, missing = torch.empty(0), 1
    for rank, piece in ((rank, one["operators"][name]) for rank, one in ranks.items() if name in one["operators"]):
        writer = str(piece.get("saved_by", rank))
        at = f"{piece['iteration']:010d}-{ranks[rank]['life']}.{ranks[rank]['attempt']}"
        slab = f"rank-{int(writer):05d}.{'expert-' if piece.get('apart') else ''}{kind}-{at}.safetensors"
        values = load(read(checkpoint.parent / "slabs" / slab, ranks[writer]["files"][slab]["xxh3_128"]))[key]
        if not len(whole):
            whole = torch.full((torch.Size(piece["global_shape"]).numel(),), torch.nan, dtype=values.dtype)
        whole[piece["offset"] : piece["offset"] + piece["numel"]] = values
        missing, shape = int(whole.isnan().sum()), piece["global_shape"]
    if missing:
        raise ValueError(f"{missing} elements of {key} are missing")
    return whole.view(shape)


SIZES = {"h.0.weight": (4, 3), "h.1.expert": (600_000,)}


def whole_of(key: str) -> torch.Tensor:
    shape = SIZES[key.split("/")[-1]]
    return torch.arange(float(torch.Size(shape).numel())).view(shape) + len(key)


def part(rank: int, *, split: bool) -> Shard:
    operators = {}
    for name, shape in SIZES.items():
        size = torch.Size(shape).numel()
        start, stop = (rank * size // 2, (rank + 1) * size // 2) if split else (0, size)
        weights, moment = (whole_of(key).reshape(-1)[start:stop] for key in (f"param/{name}", f"moment/m/{name}"))
        operators[name] = OperatorState(name, ParamSlice(weights, shape, start), {"m": moment}, 10)
    return Shard(operators)


@pytest.fixture(params=["split over ranks", "shared out, experts apart"])
def checkpoint(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    split = request.param == "split over ranks"
    stores = [CheckpointStore(tmp_path, rank, 2, "run", 1) for rank in range(2)]
    stores[0].prepare()
    for rank, store in enumerate(stores):
        snapshot = Snapshot(10, part(rank, split=split), {"rank": rank})
        if not split:
            alike = {name: operator_record(one).described for name, one in snapshot.shard.operators.items()}
            left = sorted(SIZES)[1 - rank]
            experts = frozenset({"h.1.expert"})
            snapshot.contents = replace(Contents(), experts=experts, writers={left: 1 - rank}, replicated=alike)
        store.write(snapshot)
    assert stores[0].commit(10, 5.0, threading.Event()).committed
    return stores[0].catalogue()[0].directory


@pytest.mark.parametrize("key", [f"{kind}/{name}" for kind in ("param", "moment/m") for name in SIZES])
def test_a_stranger_puts_a_parameter_together(checkpoint: Path, key: str) -> None:
    assert torch.equal(parameter(checkpoint, key), whole_of(key))


def all_of(checkpoint: Path) -> list[torch.Tensor]:
    return [parameter(checkpoint, f"{kind}/{name}") for kind in ("param", "moment/m") for name in SIZES]


def test_a_stranger_finds_damage_in_every_file_that_it_reads(checkpoint: Path) -> None:
    for path in sorted([*checkpoint.iterdir(), *(checkpoint.parent / "slabs").iterdir()]):
        data = path.read_bytes()
        if "extra" in path.name or (path.suffix == ".safetensors" and not load(data)):
            continue  # it holds no parameter
        path.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
        with pytest.raises(ValueError, match="damaged"):
            all_of(checkpoint)
        path.write_bytes(data)
