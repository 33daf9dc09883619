"""The training job of the demo: one rank of a DeepSpeed run, started by `cpsr run`.

Everything CPSR needs is the `with` line and the loader; the loop is the user's. The notes time a restart.
"""

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

from cpsr.demo.timeline import Notes

notes = Notes()

import deepspeed  # noqa: E402, F401 - what is imported is timed
import torch  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler  # noqa: E402

notes.add("frameworks")

from cpsr.recovery import CPSRRecovery  # noqa: E402

notes.add("cpsr")

from cpsr.demo.device import join_ranks  # noqa: E402
from cpsr.demo.model import BATCH, GPT, GPTConfig, Windows, read_corpus, zero_engine  # noqa: E402

PEAK_LEARNING_RATE = 1e-3
WARM_UP_ITERATIONS = 50
VALIDATION_CHUNKS = 8  # each rank evaluates half
CHUNK_WINDOWS = 12
VALIDATION_ITERATIONS = 25  # how often the validation loss is taken; at the failure, too


def main() -> None:
    """Train `--iterations` steps in `--run-dir`, resuming whatever is there."""
    arguments = _parse()
    engine = _engine(arguments.iterations)
    train, held_out = read_corpus()
    windows = Windows(train, GPTConfig().context)
    loader = DataLoader(windows, batch_size=BATCH, sampler=DistributedSampler(windows), drop_last=True)
    chunks = [chunk.to(engine.device) for chunk in _validation_chunks(held_out)]
    notes.add("job")

    with CPSRRecovery(engine, arguments.run_dir / "cpsr.yaml") as recovery:
        notes.add("opened")
        (arguments.run_dir / f"pid-{engine.global_rank}").write_text(str(os.getpid()))
        if recovery.restored.predicted:
            _validate(engine, chunks, recovery.iteration, arguments.run_dir)
        notes.add("evaluated")
        for batch in recovery.resume(loader, repeat=True):
            engine.backward(engine(batch.to(engine.device)))
            engine.step()
            if recovery.restored.predicted and recovery.iteration == recovery.restored.restored_iteration + 1:
                notes.add("stepped")
                notes.write(arguments.run_dir, engine.global_rank)
            if recovery.iteration % VALIDATION_ITERATIONS == 0 or recovery.iteration == arguments.failure_iteration:
                _validate(engine, chunks, recovery.iteration, arguments.run_dir)
            if recovery.iteration >= arguments.iterations:
                break
    torch.distributed.destroy_process_group()  # or gloo's threads may abort the exit, and the launcher start once more


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--failure-iteration", type=int, required=True, help="validate at this one, too")
    return parser.parse_args()


def _engine(iterations: int) -> Any:
    join_ranks()
    torch.manual_seed(0)
    model = GPT(GPTConfig())
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)

    def schedule(step: int) -> float:
        warm_up = min(1.0, (step + 1) / WARM_UP_ITERATIONS)
        return warm_up * 0.5 * (1 + math.cos(math.pi * min(1.0, step / iterations)))

    return zero_engine(model, optimizer, schedule)


def _validation_chunks(text: torch.Tensor) -> list[torch.Tensor]:
    windows = Windows(text, GPTConfig().context)
    stride = len(windows) // (VALIDATION_CHUNKS * CHUNK_WINDOWS)
    items = torch.stack([windows[index * stride] for index in range(VALIDATION_CHUNKS * CHUNK_WINDOWS)])
    return list(torch.split(items, CHUNK_WINDOWS))


@torch.no_grad()
def _validate(engine: Any, chunks: list[torch.Tensor], iteration: int, run_dir: Path) -> None:
    """Append the mean loss of every chunk to validation.jsonl; the ranks share the chunks."""
    losses = torch.zeros(len(chunks), device=engine.device)  # where NCCL reduces, and gloo can
    for index in range(engine.global_rank, len(chunks), engine.world_size):
        losses[index] = engine.module.losses(chunks[index]).mean()
    torch.distributed.all_reduce(losses)
    if engine.global_rank == 0:
        with (run_dir / "validation.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"iteration": iteration, "losses": losses.tolist()}) + "\n")


if __name__ == "__main__":
    main()
