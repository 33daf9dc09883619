"""A tiny Llama 3 trained by torchtitan's Trainer, split over its ranks (FSDP2), that comes back after a kill.

    cpsr run --nproc-per-node=2 examples/torchtitan_train.py --folder runs/titan --kill-at 14

Rank 1 is killed after step 14. The launcher starts the ranks again; the run goes on and ends at step 24.
"""

import argparse
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils

HOST = SimpleNamespace(**vars(torch.cpu))
HOST.current_device, HOST.get_device_name, HOST.memory_stats = lambda: 0, lambda device: "CPU", lambda device: {}
HOST.get_device_properties = lambda device: SimpleNamespace(total_memory=1)
HOST.reset_peak_memory_stats = HOST.empty_cache = lambda: None
if not torch.cuda.is_available():  # torchtitan would take CUDA all the same; its other modules copy these two
    utils.device_type, utils.device_module = "cpu", HOST  # type: ignore[assignment]

from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.hf_datasets import DatasetConfig, text_datasets  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from cpsr import CPSRRecovery, TorchAdapter  # noqa: E402

LINES = [line for line in Path(__file__).read_text(encoding="utf-8").splitlines() if line]  # what the model learns


class Bytes(BaseTokenizer):
    """A byte is a token, and 0 ends a line."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """From which the Trainer builds it."""

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, text: str, **_: bool) -> list[int]:
        return [*text.encode(), 0]

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()

    def get_vocab_size(self) -> int:
        return 256


class RecoverableTrainer(Trainer):
    """What a Trainer needs for CPSR, and for this example a kill."""

    folder: Path
    kill_at: int | None

    def batch_generator(self, data_iterable: Any) -> Any:
        """The Trainer calls this once, after it has loaded a checkpoint of its own: CPSR's state is the newer one."""
        model, optimizers, schedulers = self.model_parts[0], list(self.optimizers), list(self.lr_schedulers)
        batches = self.gradient_accumulation_steps * self.num_pipeline_parallel_microbatches
        adapter = TorchAdapter(model, optimizers, schedulers, micro_batches_per_iteration=batches)
        checkpoint = {"interval_iterations": 5}
        config = {"run_dir": str(self.folder / "cpsr"), "mode": "exact", "checkpoint": checkpoint}
        self.losses: dict[str, float] = {}
        self.recovery = CPSRRecovery(adapter, config).open()
        if self.step and not self.recovery.iteration:
            raise ValueError("torchtitan has loaded a checkpoint, and CPSR follows a run from its first step")
        self.recovery.register("trainer", self)
        self.recovery.register("losses", self.losses)
        self.step = self.recovery.iteration
        return super().batch_generator(self.recovery.resume(data_iterable, repeat=True))

    def forward_backward_step(self, **batch: Any) -> torch.Tensor:
        loss = super().forward_backward_step(**batch)
        self.recovery.log_loss(loss.detach())
        self.losses[str(self.step)] = loss.item()
        return loss

    def train_step(self, data_iterator: Any) -> None:
        super().train_step(data_iterator)
        if self.step == self.kill_at and self.recovery.restored.restored_iteration == 0 and os.environ["RANK"] == "1":
            while not any(self.folder.glob("cpsr/checkpoints/step-*/COMMIT")):  # else it would begin anew
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        self.recovery.close()
        super().close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kill-at", type=int)
    options = parser.parse_args()

    init_logger()
    text_datasets.DATASETS["lines"] = DatasetConfig(
        "", lambda _: Dataset.from_dict({"text": LINES}), lambda row: row["text"]
    )
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config = Trainer.Config(
        model_spec=spec,
        dump_folder=str(options.folder / "titan"),
        tokenizer=Bytes.Config(),
        dataloader=text_datasets.HuggingFaceTextDataLoader.Config(dataset="lines"),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=4),
        training=TrainingConfig(
            local_batch_size=2, global_batch_size=8, seq_len=64, steps=24, disable_cuda_graphs=True
        ),
        checkpoint=CheckpointManager.Config(enable=True, interval=12),  # torchtitan's own, beside those of CPSR
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),  # the default needs a newer torch than 2.13
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=2048)),
        debug=DebugConfig(seed=7),
    )
    if not hasattr(torch.distributed, "set_timeout"):  # likewise
        dist_utils.set_pg_timeouts = lambda **_: None
    trainer = RecoverableTrainer(config)
    trainer.folder, trainer.kill_at = options.folder, options.kill_at
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has none that divides
    trainer.train()
    trainer.close()

    weights = {name: one.to_local() for part in trainer.model_parts for name, one in part.named_parameters()}
    torch.save({"weights": weights, "losses": trainer.losses}, options.folder / f"final-{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
