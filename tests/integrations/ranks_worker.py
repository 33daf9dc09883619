"""One rank of a small job in another package's loop, of which rank 1 can kill itself after a step."""

import hashlib
import math
import os
import signal
import time
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from cpsr import CPSRRecovery
from cpsr.demo.device import join_ranks
from tests.recovery.job import LifeOptions

ITEMS, BATCH = 42, 2  # on two ranks 11 batches each, in 6 steps
GLOBAL_BATCH, RESIZED_ITEMS = 8, 48  # also 6 steps
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": BATCH,
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6},
    "zero_allow_untested_optimizer": True,
}


@dataclass(frozen=True)
class Options(LifeOptions):
    """What one life of the job does.

    Attributes:
        loop: `Trainer` or `accelerate`, alone or `with DeepSpeed` or `with FSDP`, `accelerate unseeded`,
            `Lightning` or `Fabric`.
        fault: the step after which rank 1 kills itself.
        save_steps: after how many the Trainer saves a checkpoint of its own; 0 for none.
        own_checkpoint: the one that the Trainer resumes, without CPSR.
        resized: whether the number of ranks changes within the run: the global batch stays, and nothing else differs.
    """

    loop: str = ""
    save_steps: int = 0
    own_checkpoint: str = ""
    resized: bool = False

    @property
    def accumulated(self) -> int:
        """Batches of a rank in a step."""
        return GLOBAL_BATCH // BATCH // int(os.environ["WORLD_SIZE"])

    def net(self) -> "Net":
        return Net(dropout=0.0 if self.resized else 0.2)

    def items(self) -> "Items":
        return Items(RESIZED_ITEMS if self.resized else ITEMS)

    def after_step(self, step: int) -> None:
        if self.fault and step == int(self.fault) and os.environ["RANK"] == "1":
            while self.committed is not None and not self.committed.exists():
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)


class Items(Dataset[Any]):
    """Inputs and the sines that are to be learned."""

    def __init__(self, count: int) -> None:
        self.x = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": self.x[index].sin().sum()}


class Net(nn.Module):
    """Returns its loss; the dropout makes random states matter. `trained` has the inputs and losses of each batch."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))
        self.trained: list[tuple[list[float], float]] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        output = self.layers(x).squeeze(-1)
        loss = nn.functional.mse_loss(output, labels)
        self.trained.append((x[:, 0].tolist(), loss.item()))
        return {"loss": loss, "logits": output}


def main(options: Options, rank: int, ranks: int) -> None:
    # Accelerate asks for them as torchrun sets them; the group of the ranks is there by then.
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ["ACCELERATE_USE_CPU"] = "true"
    join_ranks(options.meeting)
    if "FSDP" in options.loop or options.loop == "accelerate with DeepSpeed":
        distribute_on_the_host()
    train = LOOPS.get(options.loop.split()[0], with_trainer)
    torch.manual_seed(3)
    net = options.net()
    steps, losses = train(options, net)
    whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in net.state_dict().values()]
    digest = hashlib.sha256(b"".join(one.detach().float().numpy().tobytes() for one in whole)).hexdigest()
    result = {"steps": steps, "state": digest, "losses": losses}
    if options.resized:
        result["trained"] = net.trained
    options.leave(rank, result)
    torch.distributed.destroy_process_group()  # or gloo's threads may abort the exit


def distribute_on_the_host() -> None:
    """Accelerate leaves FSDP out on ranks without an accelerator, and takes ranks of DeepSpeed for one: tell it of one.

    `fully_shard`, DeepSpeed and gloo run there all the same.
    """
    from accelerate.state import DistributedType, PartialState

    found = ("gloo", DistributedType.MULTI_GPU)
    mock.patch.object(PartialState, "_prepare_backend", return_value=found).start()
    mock.patch.object(PartialState, "set_device", lambda self: setattr(self, "device", torch.device("cpu"))).start()


def with_trainer(options: Options, net: Net) -> Any:
    from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

    from cpsr.integrations.transformers import CPSRCallback

    class AfterStep(TrainerCallback):  # type: ignore[misc]  # untyped here
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            options.after_step(state.global_step)

    set_seed(3)
    args = TrainingArguments(
        output_dir=str(options.result.with_suffix(".trainer")),
        max_steps=options.iterations,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=options.accumulated,
        learning_rate=1e-2,
        lr_scheduler_type="constant" if options.resized else "linear",
        logging_steps=5,
        save_strategy="steps" if options.save_steps else "no",
        save_steps=options.save_steps or 1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        deepspeed=DEEPSPEED | {"gradient_accumulation_steps": options.accumulated}
        if "DeepSpeed" in options.loop
        else None,
        fsdp="FSDP" in options.loop,
        fsdp_config={"version": 2, "auto_wrap_policy": "NO_WRAP"} if "FSDP" in options.loop else None,
    )
    trainer = Trainer(model=net, args=args, train_dataset=options.items())
    if not options.own_checkpoint:
        trainer.add_callback(CPSRCallback(trainer, options.config))
    trainer.add_callback(AfterStep())
    trainer.train(resume_from_checkpoint=options.own_checkpoint or None)
    losses = [[entry["step"], entry["loss"]] for entry in trainer.state.log_history if "loss" in entry]
    return trainer.state.global_step, losses


def accelerator_of(options: Options) -> Any:
    from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin, FullyShardedDataParallelPlugin

    loop, accumulated = options.loop, options.accumulated
    seedable = options.resized and "unseeded" not in loop
    plugins: dict[str, Any] = {"dataloader_config": DataLoaderConfiguration(use_seedable_sampler=seedable)}
    if "DeepSpeed" in loop:
        os.environ["ACCELERATE_USE_CPU"] = "false"  # or accelerate leaves DeepSpeed out
        config = DEEPSPEED | {"gradient_accumulation_steps": accumulated}
        plugins["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=config)
    if "FSDP" in loop:
        plugins["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP")
    return Accelerator(cpu="DeepSpeed" not in loop, gradient_accumulation_steps=accumulated, **plugins)


def with_accelerate(options: Options, net: Net) -> Any:
    from accelerate.utils import set_seed

    from cpsr.integrations.accelerate import engine_of, resume

    accelerator = accelerator_of(options)
    set_seed(3)
    adam = torch.optim.AdamW(net.parameters(), 1e-2)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(adam, 8, 0.7)
    loader: Any = DataLoader(options.items(), BATCH, shuffle=True)
    model: Any
    optimizer: Any
    model, optimizer, loader = accelerator.prepare(net, adam, loader)
    if not options.resized:
        scheduler = accelerator.prepare(scheduler)  # a step on each rank for every one of the optimizer
    losses: dict[str, float] = {}
    with CPSRRecovery(engine_of(accelerator, model, optimizer, scheduler), options.config) as recovery:
        recovery.register("losses", losses)
        if "DeepSpeed" in options.loop:
            recovery.register("scheduler", scheduler)  # which the loop steps, and not the engine
        for batch in resume(recovery, loader, epochs=math.ceil(options.iterations / 6)):
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                if not options.resized or accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
            losses[str(recovery.iteration)] = loss.item()
            options.after_step(recovery.iteration)
            if options.resized and recovery.iteration == options.iterations:
                break
    return recovery.iteration, [*losses.items(), scheduler.get_last_lr()]


def with_lightning(options: Options, net: Net) -> Any:
    from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
    from lightning.pytorch.strategies import DDPStrategy

    from cpsr.integrations.lightning import CPSRCallback

    class Module(LightningModule):  # type: ignore[misc]  # untyped here
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    class AfterStep(Callback):  # type: ignore[misc]  # untyped here
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            options.after_step(trainer.global_step)

    seed_everything(3)
    trainer = Trainer(
        max_steps=options.iterations,
        accumulate_grad_batches=options.accumulated,
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=DDPStrategy(cluster_environment=joined(), process_group_backend="gloo"),
        callbacks=[CPSRCallback(options.config), AfterStep()],
        default_root_dir=options.result.with_suffix(".lightning"),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(options.items(), BATCH, shuffle=True))
    return trainer.global_step, []


def joined() -> Any:
    """For Lightning: the processes are there already."""
    from lightning.fabric.plugins.environments import LightningEnvironment

    class Joined(LightningEnvironment):  # type: ignore[misc]  # untyped here
        @property
        def creates_processes_externally(self) -> bool:
            return True

        def world_size(self) -> int:
            return int(os.environ["WORLD_SIZE"])

        def global_rank(self) -> int:
            return int(os.environ["RANK"])

    return Joined()


def with_fabric(options: Options, net: Net) -> Any:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    from cpsr.integrations.fabric import Passes, engine_of

    strategy = DDPStrategy(cluster_environment=joined(), process_group_backend="gloo")
    fabric: Any = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy)
    fabric.launch()
    fabric.seed_everything(3)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), 1e-2))
    loader = fabric.setup_dataloaders(DataLoader(options.items(), BATCH, shuffle=True))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader, "batches": 0, "losses": []}
    with CPSRRecovery(engine_of(model, optimizer, state=state), options.config) as recovery:
        passes = Passes(recovery, loader)
        while recovery.iteration < options.iterations:
            for batch in passes:
                state["batches"] += 1
                accumulates = state["batches"] % options.accumulated != 0
                with fabric.no_backward_sync(model, enabled=accumulates):
                    loss = model(**batch)["loss"]
                    fabric.backward(loss)
                if accumulates:
                    continue
                optimizer.step()
                optimizer.zero_grad()
                state["losses"] = [*state["losses"], loss.item()]
                options.after_step(recovery.iteration)
                if recovery.iteration == options.iterations:
                    break
    return recovery.iteration, [state["batches"], *state["losses"]]


LOOPS = {"accelerate": with_accelerate, "Lightning": with_lightning, "Fabric": with_fabric}
