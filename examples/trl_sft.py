"""LoRA of a tiny GPT-2 with the SFTTrainer of TRL, on packed prompts and completions, that comes back after a kill.

    python examples/trl_sft.py --folder runs/sft --kill-at 17   # killed after step 17
    python examples/trl_sft.py --folder runs/sft                # goes on, and ends at step 30

The launcher starts it again by itself: `cpsr run examples/trl_sft.py --folder runs/sft --kill-at 17`. Model, tokenizer
and data are made here, so nothing is downloaded.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer

from cpsr.integrations.transformers import CPSRCallback

STEPS = 30
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
END = "<end>"


def tokenizer_of_bytes() -> PreTrainedTokenizerFast:
    """One token for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())  # which has another order in each process
    bytewise = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
    bytewise.pre_tokenizer, bytewise.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token=END, pad_token=END)


def sums(first: range) -> Dataset:
    """Sums of two numbers, in words: the loss is that of the completions alone."""
    pairs = [(one, other) for one in first for other in range(7)]
    prompts = [f"{WORDS[one]} and {WORDS[other]} is" for one, other in pairs]
    return Dataset.from_dict({"prompt": prompts, "completion": [f" {WORDS[one + other]}" for one, other in pairs]})


class KillAt(TrainerCallback):
    """Ends the first life as a crash would, once there is a checkpoint to come back to."""

    def __init__(self, step: int, cpsr: CPSRCallback, run_dir: Path) -> None:
        self.step, self.cpsr, self.run_dir = step, cpsr, run_dir

    def on_step_end(self, args, state, control, **kwargs):
        first_rank_is_there = state.is_world_process_zero and state.global_step == self.step
        if first_rank_is_there and self.cpsr.recovery.restored.restored_iteration == 0:
            while not any(self.run_dir.glob("checkpoints/step-*/COMMIT")):
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kill-at", type=int)
    options = parser.parse_args()

    set_seed(7)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=257, n_positions=64, n_embd=32, n_layer=2, n_head=2))
    args = SFTConfig(
        output_dir=str(options.folder / "trainer"),
        max_steps=STEPS,
        max_length=64,
        packing=True,
        packing_strategy="wrapped",  # the others need flash attention
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=4,
        eval_strategy="steps",
        eval_steps=10,
        save_steps=10,  # the Trainer's own checkpoints, beside those of CPSR
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        seed=7,
    )
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=sums(range(6)),
        eval_dataset=sums(range(6, 7)),
        processing_class=tokenizer_of_bytes(),
        peft_config=LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1),
    )
    run_dir = options.folder / "cpsr"
    config = {"run_dir": str(run_dir), "mode": "exact", "checkpoint": {"interval_iterations": 5}}
    cpsr = CPSRCallback(trainer, config)
    trainer.add_callback(cpsr)
    if options.kill_at is not None:
        trainer.add_callback(KillAt(options.kill_at, cpsr, run_dir))
    trainer.train()

    trainer.save_model(str(options.folder / "final"))
    if trainer.is_world_process_zero():  # which has made the directory
        trainer.state.save_to_json(str(options.folder / "final" / "trainer_state.json"))
        print(json.dumps({"step": trainer.state.global_step, "epoch": trainer.state.epoch}))


if __name__ == "__main__":
    main()
