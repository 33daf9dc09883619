"""One rank that saves a ZeRO-1 checkpoint by DeepSpeed, makes it universal, or loads it on another number of ranks."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal

from cpsr.benchmarks.harness.ranks import join_ranks
from cpsr.benchmarks.reshard.values import fill, forget_files, holds, measured, parameter_shapes

__all__ = ["main"]

WORKERS = 2  # of the conversion: as many as the machine has cores


def main(run_dir: Path, place: str, work: str, width: int, layers: int) -> dict[str, Any] | None:
    """Do one piece of work.

    Args:
        run_dir: of the job, for its meeting.
        place: directory of the checkpoints.
        work: `save`; `convert`: `ds_to_universal`, on one rank; or `load` of the universal checkpoint.
        width: of the model.
        layers: of it.

    Returns:
        Of a conversion its `seconds`; of a load what `measured` finds, whose values it compares.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    join_ranks(run_dir)
    saved, universal = Path(place) / "deepspeed", Path(place) / "universal"
    if work == "convert":
        return {"seconds": _convert(saved, universal)}
    if work == "load":
        return measured(_load(universal, parameter_shapes(width, layers)))
    engine = _engine(parameter_shapes(width, layers))
    engine.backward(engine())
    engine.step()  # which makes the moments; the learning rate is 0
    engine.save_checkpoint(str(saved))
    dist.barrier()
    forget_files(saved)
    return None


class _Model(torch.nn.Module):
    def __init__(self, shapes: dict[str, tuple[int, ...]], *, filled: bool) -> None:
        super().__init__()
        for name, shape in shapes.items():
            values = torch.zeros(shape)
            if filled:
                fill(values, 0, name, 0)
            self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(values))

    def forward(self) -> torch.Tensor:
        """A loss with a gradient of every parameter."""
        return torch.stack([one.view(-1)[0] for one in self.parameters()]).sum()


def _engine(shapes: dict[str, tuple[int, ...]], *, filled: bool = True) -> Any:
    model = _Model(shapes, filled=filled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, foreach=False)  # foreach copies all
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
            "checkpoint": {"load_universal": not filled},
        },
    )
    return engine


def _convert(saved: Path, universal: Path) -> float:
    given = argparse.Namespace(
        input_folder=str(saved / (saved / "latest").read_text()),
        output_folder=str(universal / "whole"),
        num_extract_workers=WORKERS,
        num_merge_workers=WORKERS,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    forget_files(saved)
    started = perf_counter()
    ds_to_universal.main(given)
    return perf_counter() - started


def _load(universal: Path, shapes: dict[str, tuple[int, ...]]) -> Iterator[Any]:
    engine = _engine(shapes, filled=False)
    part_bytes = 3 * sum(one.nbytes for one in engine.optimizer.single_partition_of_fp32_groups)
    yield part_bytes, universal
    engine.load_checkpoint(str(universal), tag="whole")
    yield 0
    parameters = dict(engine.module.named_parameters())
    yield all(holds(parameters[name.replace(".", "_")].detach(), 0, name, 0) for name in shapes)
