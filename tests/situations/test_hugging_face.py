"""Loops with transformers and accelerate whose state is not only that of the model: bit for bit, or refused by name."""

import importlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from cpsr import CPSRRecovery
from cpsr.errors import ConfigError, UnsupportedEngineError
from tests.situations.drawing import Drawing
from tests.situations.lives import Life, digest, forked, live

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, find_executable_batch_size
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_callback import ExportableState

integration: Any = importlib.import_module("cpsr.integrations.accelerate")
CPSRCallback: Any = importlib.import_module("cpsr.integrations.transformers").CPSRCallback

ITEMS = 60


def items(count: int = ITEMS) -> list[dict[str, torch.Tensor]]:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    return [{"x": one, "labels": one.sin().sum(0, keepdim=True)} for one in x]


class Net(nn.Module):
    """Returns its loss, and notes those of this life."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor, weight: float = 1.0) -> dict[str, torch.Tensor]:
        loss = nn.functional.mse_loss(self.layers(x), labels)
        if self.training:
            self.losses.append(loss.item())
        return {"loss": loss * weight}


class Counter(TrainerCallback, ExportableState):  # type: ignore[misc]  # untyped here
    """Counts in what it gives its own `__init__`, and in an attribute; the rate depends on both."""

    def __init__(self, begun: int = 0) -> None:
        self.begun, self.ended = begun, 0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.begun += 1

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.ended += 1
        optimizer.param_groups[0]["weight_decay"] = 0.01 * self.begun + 0.001 * self.ended

    def state(self) -> dict[str, Any]:
        return {"args": {"begun": self.begun}, "attributes": {"ended": self.ended}}


class Cut(TrainerCallback):  # type: ignore[misc]  # untyped here
    def __init__(self, life: Life) -> None:
        self.life = life

    def on_step_end(self, args: Any, state: Any, *more: Any, **kwargs: Any) -> None:
        self.life.step(state.global_step)


def with_trainer(life: Life) -> Any:
    set_seed(5)
    net, arguments = Net(), life.options.get("arguments", {})
    data: Any = items()
    if "persistent" in life.options:
        data = Drawing(named=True)
        arguments = {"dataloader_num_workers": 2, "dataloader_persistent_workers": life.options["persistent"]}
    args = TrainingArguments(
        output_dir=str(life.directory / "own"),
        **{"num_train_epochs": 4, "eval_strategy": "steps", "eval_steps": 3, "logging_steps": 4, **arguments},
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,  # 15 batches: 8 steps in a pass
        save_strategy="no",
        metric_for_best_model="loss",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    counter, stopping = (
        Counter(),
        EarlyStoppingCallback(life.options.get("patience", [100])[-1 if life.number else 0], 10.0),
    )
    trainer = Trainer(net, args, train_dataset=data, eval_dataset=items(8), callbacks=[counter, stopping])
    callback = None
    if life.options.get("followed", True):
        callback = CPSRCallback(
            trainer, life.config(restart={"hyperparameters": life.options.get("choice", "checkpoint")})
        )
        trainer.add_callback(callback)
    trainer.add_callback(Cut(life))
    trainer.train()
    state = trainer.state
    logged = [[one.get("loss"), one.get("eval_loss")] for one in state.log_history if "train_loss" not in one]
    end = [state.global_step, state.epoch, state.best_metric, counter.begun, counter.ended, logged, digest(net)]
    return [end, net.losses, callback.recovery.restored.restored_iteration if callback else 0]


class Steps:
    """Counts, for `register_for_checkpointing`."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def with_accelerate(life: Life) -> Any:
    """The weight of a loss comes from an object, the pass and the number of the batch; with an average."""
    across = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=life.options["ends"])
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=across)
    set_seed(5)
    net = Net()
    adam = torch.optim.AdamW(net.parameters(), 1e-2)
    schedule: Any = torch.optim.lr_scheduler.ExponentialLR(adam, 0.7)
    averaging: Any = get_ema_multi_avg_fn
    steps, average = Steps(), AveragedModel(net, multi_avg_fn=averaging(0.9))
    accelerator.register_for_checkpointing(steps, average)
    loader: Any = DataLoader(items(), batch_size=4, shuffle=True)  # type: ignore[arg-type]  # a list is a dataset
    model, optimizer, loader, schedule = accelerator.prepare(net, adam, loader, schedule)

    def train(epoch: int, batch_idx: int, batch: Any) -> None:
        with accelerator.accumulate(model):
            weight = 1.0 / (1 + steps.count) + 0.1 * batch_idx + 0.1 * epoch
            accelerator.backward(model(**batch, weight=weight)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            steps.count += 1
            average.update_parameters(net)
            life.step(steps.count)

    if not life.options.get("followed", True):
        for epoch in range(4):
            loader.set_epoch(epoch)
            for batch_idx, batch in enumerate(loader):
                train(epoch, batch_idx, batch)
            schedule.step()
        return [[steps.count, digest(net, average)], net.losses, 0]
    with CPSRRecovery(integration.engine_of(accelerator, model, optimizer), life.config()) as recovery:
        for epoch in range(recovery.epoch, 4):
            for batch_idx, batch in enumerate(integration.resume(recovery, loader), start=recovery.batch):
                train(epoch, batch_idx, batch)
            schedule.step()
    return [[steps.count, digest(net, average)], net.losses, recovery.restored.restored_iteration]


def search_of_accelerate(life: Life) -> str:
    """Refused, and also a batch that fits is not searched for."""

    @find_executable_batch_size(starting_batch_size=8)  # type: ignore[untyped-decorator]
    def train(batch_size: int) -> None:
        accelerator = Accelerator(cpu=True)
        net = Net()
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
        integration.engine_of(accelerator, model, optimizer)

    with pytest.raises(UnsupportedEngineError) as refused:
        train()
    return str(refused.value)


def search_of_transformers(life: Life) -> str:
    life.options = {"arguments": {"auto_find_batch_size": True}}
    with pytest.raises(ConfigError) as refused:
        with_trainer(life)
    return str(refused.value)


CASES: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "transformers": (with_trainer, 13, {}),
    "transformers, later with another patience": (with_trainer, 13, {"patience": [5, 100]}),
    "accelerate": (with_accelerate, 13, {"ends": True}),
    "accelerate, accumulated over the ends of passes": (with_accelerate, 18, {"ends": False}),
    "transformers, persistent workers": (with_trainer, 7, {"persistent": True}),
}
FINISHED = ("transformers", "accelerate")  # of these a finished run is started once more
REFUSED = {"auto_find_batch_size": search_of_transformers, "find_executable_batch_size": search_of_accelerate}


def all_lives(life: Life) -> dict[str, list[Any]]:
    """Of each case: without CPSR, killed and started again; then what is refused."""
    ends = {}
    for name, (loop, at, options) in CASES.items():
        cut = life.directory / name / "cut"
        lives = [
            Life(life.directory / name / "without", options=options | {"followed": False}),
            Life(cut, at, options=options),
            *(Life(cut, number=number, options=options) for number in (1, 2)[: 1 + (name in FINISHED)]),
        ]
        ends[name] = forked(loop, lives)
    options = {"patience": [5, 100], "choice": "script"}
    lives = [Life(life.directory / "choice", at, number=number, options=options) for number, at in enumerate((13, 0))]
    ends["choice"] = forked(with_trainer, lives)
    return ends | {name: forked(loop, [Life(life.directory / name)]) for name, loop in REFUSED.items()}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = live(all_lives, Life(tmp_path_factory.mktemp("lives")), seconds=500.0).result
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_loop_comes_back_bit_for_bit(name: str, ends: dict[str, list[Any]]) -> None:
    without, _, cut, *finished = ends[name]
    assert cut[2] > 0  # the restored iteration
    assert cut[0] == without[0]
    assert cut[1] == without[1][-len(cut[1]) :]
    assert all(again[:2] == [without[0], []] for again in finished)


def test_the_script_may_choose_the_arguments_of_a_callback(ends: dict[str, list[Any]]) -> None:
    stopped = ends["transformers, later with another patience"][0][0][0]
    steps, *_, begun, ended, _, _ = ends["choice"][1][0]
    assert stopped < steps == begun == ended == 32


@pytest.mark.parametrize("name", REFUSED)
def test_a_search_for_a_batch_size_is_refused_by_name(name: str, ends: dict[str, list[Any]]) -> None:
    assert ends[name][0].startswith(name)
