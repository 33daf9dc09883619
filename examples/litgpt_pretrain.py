"""LitGPT's own pretraining, of a tiny GPT on this file, that comes back after a kill.

    python examples/litgpt_pretrain.py --folder runs/litgpt --kill-at 17   # killed after step 17
    python examples/litgpt_pretrain.py --folder runs/litgpt                # goes on, and ends at step 30

The launcher starts it again by itself: `cpsr run examples/litgpt_pretrain.py --folder runs/litgpt --kill-at 17`. The
loop is LitGPT's: `with_cpsr` opens the run around `litgpt.pretrain.fit`.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import torch
from litgpt import pretrain
from litgpt.args import EvalArgs, TrainArgs
from litgpt.config import Config
from litgpt.data import DataModule
from litgpt.utils import CycleIterator
from torch.utils.data import DataLoader, Dataset

from cpsr import CPSRRecovery
from cpsr.integrations.fabric import Passes, engine_of

STEPS, LENGTH = 30, 32
TEXT = Path(__file__).read_bytes()


def with_cpsr(fit, run_dir, kill_at=None):
    """The loop `fit`, which is started with the state of the run; `kill_at` is this example's alone."""

    def recoverable(*, state, train_dataloader, **given):
        config = {"run_dir": str(run_dir), "mode": "exact", "checkpoint": {"interval_iterations": 5}}
        with CPSRRecovery(engine_of(state["model"], state["optimizer"], state=state), config) as recovery:

            def cycle(loader):
                passes = CycleIterator(Passes(recovery, loader))
                passes.epoch = recovery.epoch  # of the whole run, in the log
                return passes

            pretrain.CycleIterator = cycle
            if kill_at is not None and recovery.restored.restored_iteration == 0:
                state["optimizer"].register_step_post_hook(lambda *_: crash(recovery, run_dir, kill_at))
            return fit(state=state, train_dataloader=train_dataloader, **given)

    return recoverable


def crash(recovery: CPSRRecovery, run_dir: Path, step: int) -> None:
    """End the first life as a crash would, once there is a checkpoint to come back to."""
    if recovery.iteration == step:
        while not any(run_dir.glob("checkpoints/step-*/COMMIT")):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)


class Pieces(Dataset):
    """Pieces of the text, each of 32 bytes and the next one."""

    def __init__(self, pieces: range) -> None:
        self.pieces = pieces

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(list(TEXT[LENGTH * self.pieces[index] :][: LENGTH + 1]))


class Bytes(DataModule):
    """What LitGPT asks for its data: one token for each byte."""

    def connect(self, tokenizer=None, batch_size=1, max_seq_length=None) -> None:
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Pieces(range(30)), self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Pieces(range(30, 34)), self.batch_size)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kill-at", type=int)
    options = parser.parse_args()
    sys.argv[1:] = ["tiny"]  # LitGPT's checkpoints have the command line, as `litgpt pretrain` reads it

    pretrain.fit = with_cpsr(pretrain.fit, options.folder / "cpsr", options.kill_at)
    pretrain.setup(
        "tiny",
        model_config=Config(name="tiny", block_size=LENGTH, vocab_size=256, n_layer=2, n_head=2, n_embd=32),
        out_dir=options.folder / "litgpt",
        precision="32-true",
        data=Bytes(),
        train=TrainArgs(
            save_interval=10,  # LitGPT's own checkpoints, beside those of CPSR
            log_interval=1,
            global_batch_size=4,
            micro_batch_size=2,
            max_tokens=STEPS * 4 * LENGTH,
            max_norm=1.0,
            min_lr=1e-4,
            lr_warmup_steps=4,
        ),
        eval=EvalArgs(interval=10, max_iters=2),
        devices=1,
        logger_name="csv",
    )


if __name__ == "__main__":
    main()
