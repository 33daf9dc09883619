"""A tiny GPT-2 trained from scratch with the Trainer of transformers, that comes back after a kill.

    python examples/transformers_trainer.py --folder runs/trainer --kill-at 17   # killed after step 17
    python examples/transformers_trainer.py --folder runs/trainer                # goes on, and ends at step 40

The launcher starts it again by itself: `cpsr run examples/transformers_trainer.py --folder runs/trainer --kill-at 17`.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from cpsr.integrations.transformers import CPSRCallback

STEPS = 40
TEXT = Path(__file__).read_bytes()  # what the model learns: this file, byte by byte


class Bytes(Dataset):
    """Pieces of the text, each of 32 bytes."""

    def __init__(self, pieces: range) -> None:
        self.pieces = pieces

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.tensor(list(TEXT[32 * self.pieces[index] :][:32]))
        return {"input_ids": ids, "labels": ids}


class KillAt(TrainerCallback):
    """Ends the first life as a crash would, once there is a checkpoint to come back to."""

    def __init__(self, step: int, cpsr: CPSRCallback, run_dir: Path) -> None:
        self.step, self.cpsr, self.run_dir = step, cpsr, run_dir

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step and self.cpsr.recovery.restored.restored_iteration == 0:
            while not any(self.run_dir.glob("checkpoints/step-*/COMMIT")):
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kill-at", type=int)
    options = parser.parse_args()

    set_seed(7)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    args = TrainingArguments(
        output_dir=str(options.folder / "trainer"),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=4,
        logging_steps=3,
        eval_strategy="steps",
        eval_steps=5,
        save_steps=10,  # the Trainer's own checkpoints, beside those of CPSR
        metric_for_best_model="loss",
        load_best_model_at_end=True,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
        seed=7,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Bytes(range(55)),  # 14 batches: 7 steps in a pass
        eval_dataset=Bytes(range(55, 63)),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=100)],
    )
    run_dir = options.folder / "cpsr"
    config = {"run_dir": str(run_dir), "mode": "exact", "checkpoint": {"interval_iterations": 5}}
    cpsr = CPSRCallback(trainer, config)
    trainer.add_callback(cpsr)
    if options.kill_at is not None:
        trainer.add_callback(KillAt(options.kill_at, cpsr, run_dir))
    trainer.train()

    trainer.save_model(str(options.folder / "final"))
    trainer.state.save_to_json(str(options.folder / "final" / "trainer_state.json"))
    print(json.dumps({"step": trainer.state.global_step, "best_metric": trainer.state.best_metric}))


if __name__ == "__main__":
    main()
