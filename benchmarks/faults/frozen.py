"""The job with frozen weights: its checkpoints share a file of them, until the run merges something into them."""

from pathlib import Path
from typing import Any

import torch

from cpsr.checkpoint.frozen_files import FrozenFiles
from cpsr.checkpoint.store import CheckpointStore
from cpsr.state.frozen import FrozenWeights

__all__ = ["MERGED", "freeze", "frozen_bits", "frozen_scalars", "mark", "spoil"]

MERGED = 50  # from this iteration on the weights are others
_MARKER = "frozen"  # in the directory of a run with such weights
_SHAPES = {"base.0": (30,), "base.1": (4, 5)}
_Weights = dict[str, torch.Tensor]


def mark(run_dir: Path) -> None:
    """Make the run one with frozen weights, before it is opened."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / _MARKER).touch()


def freeze(run_dir: Path, store: CheckpointStore) -> None:
    """Give a rank of such a run its weights."""
    if (run_dir / _MARKER).exists():
        tensors = _weights(store.rank, 0)
        store.frozen = FrozenFiles(FrozenWeights(lambda: tensors), store.rank, store.directory, fsync=True)


def frozen_scalars(store: CheckpointStore, iteration: int) -> dict[str, Any]:
    """Give the rank the weights of an iteration; what a snapshot then has of them, empty in other runs."""
    if store.frozen is None:
        return {}
    for name, values in _weights(store.rank, iteration).items():
        store.frozen.weights.tensors[name].copy_(values)
    store.frozen.weights.settle(anew=True)
    return {"frozen": store.frozen.weights.state(whole=True)}


def spoil(store: CheckpointStore) -> None:
    """What a script may have that does not load the weights itself."""
    for values in {} if store.frozen is None else store.frozen.weights.tensors.values():
        values.fill_(-1.0)


def frozen_bits(store: CheckpointStore, iteration: int) -> bool:
    """Whether the rank has the weights of that iteration."""
    found: Any = {} if store.frozen is None else store.frozen.weights.tensors
    return all(torch.equal(values, _weights(store.rank, iteration)[name]) for name, values in found.items())


def _weights(rank: int, iteration: int) -> _Weights:
    generator = torch.Generator().manual_seed(2 * rank + (iteration >= MERGED))
    return {name: torch.randn(shape, generator=generator) for name, shape in _SHAPES.items()}
