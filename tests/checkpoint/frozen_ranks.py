"""Ranks with frozen weights, all in one process."""

import math
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cpsr.benchmarks.harness.checkpoint_files import frozen_files
from cpsr.checkpoint.frozen_files import FrozenFiles
from cpsr.checkpoint.manifest import step_name
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore
from cpsr.state.frozen_parameters import FrozenPlace, FrozenWeights
from cpsr.state.shard import Shard
from tests.checkpoint.conftest import make_snapshot

RUN = "0e" * 16
Tensors = dict[str, torch.Tensor]


def base(seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"embed": (20, 4), "layers.0": (4, 4), "layers.1": (4, 4), "scale": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class AllAlike:
    """A group whose ranks all hold what this one holds."""

    def __init__(self, size: int) -> None:
        self.size = size

    def all(self, value: bool) -> bool:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size


class Life:
    """All ranks of a life; with `places` of the parts that each has."""

    def __init__(
        self,
        run_dir: Path,
        weights: Sequence[Tensors],
        life: int = 1,
        places: Sequence[Mapping[str, FrozenPlace]] | None = None,
    ) -> None:
        self.weights, self.life, self.ranks = weights, life, len(weights)
        self.frozen = [FrozenWeights(partial(dict, own)) for own in weights]
        self.stores = [CheckpointStore(run_dir, rank, self.ranks, RUN, life) for rank in range(self.ranks)]
        self.stores[0].prepare()
        self.directory = self.stores[0].directory
        self.files = []
        for rank, (store, frozen) in enumerate(zip(self.stores, self.frozen, strict=True)):
            frozen.settle()
            place = None if places is None else places[rank]
            store.frozen = FrozenFiles(frozen, rank, self.directory, places=place)
            self.files.append(store.frozen)

    def snapshot(self, iteration: int, rank: int = 0) -> Snapshot:
        taken = make_snapshot(iteration)
        state = self.frozen[rank].state(whole=True)
        moved = {name: values.clone() for name, values in state["moved"].items()}
        taken.scalars |= {"frozen": {"word": state["word"], "moved": moved}}
        return taken

    def save(self, iteration: int, *, shared: bool = True, trained: Shard | None = None) -> None:
        """Save of every rank; `shared`: after the ranks have agreed who writes what."""
        group: Any = AllAlike(self.ranks)
        for files in self.files if shared else ():
            files.agree(group)
        for rank in reversed(range(self.ranks)):
            taken = self.snapshot(iteration, rank)
            taken.shard = taken.shard if trained is None else trained
            self.stores[rank].write(taken)
        assert self.stores[0].commit(iteration, 5.0, threading.Event()).committed

    def inodes(self, iteration: int) -> dict[str, int]:
        directory = self.directory / step_name(iteration)
        return {path.name: path.stat().st_ino for path in frozen_files(directory)}


CUTS = ("whole", "flat", "rows", "rows of some ranks")


def cut(weights: Tensors, rank: int, ranks: int, how: str) -> tuple[Tensors, dict[str, FrozenPlace]]:
    """A rank's parts: as DDP, as ZeRO-3 in flat partitions without padding, or as FSDP2 by rows.

    Of `rows of some ranks` a rank that has no row of a parameter does not have it.
    """
    parts, places = {}, {}
    for name, whole in weights.items():
        flat = how == "flat"
        tensor = whole.reshape(-1) if flat else whole
        if how == "whole" or not tensor.dim():
            parts[name] = whole.clone()
            continue
        share = -(-tensor.shape[0] // ranks)
        begin = min(share * rank, tensor.shape[0])
        part = tensor[begin : begin + share].clone()
        if how == "rows of some ranks" and not part.numel():
            continue
        parts[name] = part
        if part.shape != whole.shape:
            places[name] = FrozenPlace(tuple(whole.shape), begin * math.prod(tensor.shape[1:]))
    return parts, places


def split_life(run_dir: Path, weights: Tensors, ranks: int, how: str, number: int = 1) -> Life:
    cuts = [cut(weights, rank, ranks, how) for rank in range(ranks)]
    return Life(run_dir, [parts for parts, _ in cuts], number, [places for _, places in cuts])
