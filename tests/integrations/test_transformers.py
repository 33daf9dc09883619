"""The Trainer of transformers under CPSR: what comes back after a failure, bit for bit, and what is refused."""

import hashlib
import importlib
import os
import signal
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from cpsr import Restored
from cpsr.errors import ConfigError, UnsupportedEngineError
from cpsr.journal import JournalReader
from tests.committed import wait_until_committed
from tests.integrations.lives import Stopped, killed_and_back

pytest.importorskip("transformers")
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

CPSRCallback: Any = importlib.import_module("cpsr.integrations.transformers").CPSRCallback
TrainerProgress: Any = importlib.import_module("cpsr.integrations.transformers").TrainerProgress

VARYING = ("_runtime", "_per_second")
STEPS = 24


class Pieces(Dataset[Any]):
    """Pieces of a fixed text of bytes."""

    def __init__(self, count: int) -> None:
        self._ids = torch.randint(0, 16, (count, 8), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


class FailAt(TrainerCallback):  # type: ignore[misc]  # untyped here
    """Fails after a step; waits for each checkpoint, or a busy disk would decide how many there are."""

    def __init__(self, step: int | None, run_dir: Path, interval: int, sigterm: bool) -> None:
        self.step, self.sigterm, self.run_dir, self.interval = step, sigterm, run_dir, interval

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        due = state.global_step % self.interval == 1 and state.global_step > self.interval
        if self.step is not None and due and not self.sigterm:
            wait_until_committed(self.run_dir, state.global_step - 1)
        if state.global_step == self.step and self.sigterm:
            os.kill(os.getpid(), signal.SIGTERM)
        elif state.global_step == self.step:
            raise Stopped


class Counting(Trainer):  # type: ignore[misc]  # untyped here
    """Keeps numbers of its own between two lines of the log, as trainers of TRL do."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.seen, self.setting = 0, "of this life"
        self.of_lines: Any = {"train": defaultdict(list)}
        self.last: Any = deque(maxlen=3)
        self.batch: Any = None

    def compute_loss(self, model: Any, inputs: Any, **named: Any) -> Any:
        if model.training:
            self.seen += len(inputs["input_ids"])
            self.of_lines["train"]["first"].append(int(inputs["input_ids"][0, 0]))
            self.last.append(int(inputs["input_ids"][0, 1]))
            self.batch = [{"input_ids": inputs["input_ids"]}]
        return super().compute_loss(model, inputs, **named)

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        logs.update(seen=self.seen, first=sum(self.of_lines["train"]["first"]), last=list(self.last))
        self.of_lines["train"].clear()
        super().log(logs, start_time)


def trainer_of(
    tmp_path: Path, items: int = 21, adapted: bool = False, kind: type[Any] = Trainer, **arguments: Any
) -> Any:
    set_seed(5)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0, resid_pdrop=0.2
        )
    )
    if adapted:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    settings: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 3,
        "logging_steps": 5,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "no",
        "use_cpu": not torch.cuda.is_available(),
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 5,
    }
    return kind(
        model=model,
        args=TrainingArguments(output_dir=str(tmp_path / "trainer"), **{**settings, **arguments}),
        train_dataset=Pieces(items),  # 11 batches, 6 steps in a pass, the last one of a single batch
        eval_dataset=Pieces(4),
    )


def follow(
    trainer: Any,
    tmp_path: Path,
    fail_at: int | None = None,
    *,
    mode: str = "exact",
    interval: int = 4,
    events: list[Any] | None = None,
    sigterm: bool = False,
) -> Any:
    """Add CPSR, and what ends the life after a step."""
    config = {
        "run_dir": str(tmp_path / "cpsr"),
        "mode": mode,
        "checkpoint": {"interval_iterations": interval, "shared_memory": False},
    }
    callback = CPSRCallback(trainer, config, on_event=() if events is None else (events.append,))
    trainer.add_callback(callback)
    trainer.add_callback(FailAt(fail_at, tmp_path / "cpsr", interval, sigterm))
    return callback


def digest(trainer: Any) -> str:
    total = hashlib.sha256()
    for value in trainer.model.state_dict().values():
        total.update(value.cpu().numpy().tobytes())
    for state in trainer.optimizer.state_dict()["state"].values():
        total.update(b"".join(one.cpu().numpy().tobytes() for one in state.values()))
    return total.hexdigest()


def log_of(trainer: Any) -> list[dict[str, float]]:
    return [
        {name: value for name, value in entry.items() if not name.endswith(VARYING)}
        for entry in trainer.state.log_history
    ]


def ends_with(trainer: Any) -> tuple[Any, ...]:
    state = trainer.state
    return (
        digest(trainer),
        log_of(trainer),
        state.global_step,
        state.epoch,
        state.total_flos,
        trainer.lr_scheduler.last_epoch,
    )


def uninterrupted(tmp_path: Path, **arguments: Any) -> Any:
    """Without CPSR."""
    trainer = trainer_of(tmp_path / "uninterrupted", **arguments)
    trainer.train()
    return ends_with(trainer)


def fail(tmp_path: Path, at: int, mode: str = "exact", interval: int = 4, **arguments: Any) -> None:
    trainer = trainer_of(tmp_path, **arguments)
    follow(trainer, tmp_path, at, mode=mode, interval=interval)
    with pytest.raises(Stopped):
        trainer.train()


@pytest.mark.parametrize(
    ("at", "interval", "arguments"),
    [
        (9, 4, {}),  # in the middle of a pass, and of a line of the log
        (14, 6, {}),  # between two passes
        (9, 4, {"adapted": True}),  # LoRA: the base is frozen
        (10, 4, {"gradient_accumulation_steps": 1, "max_steps": -1, "num_train_epochs": 2}),
        (9, 4, {"train_sampling_strategy": "group_by_length"}),  # an order from the global random state
        # A schedule by the evaluations.
        pytest.param(9, 4, {"lr_scheduler_type": "reduce_lr_on_plateau"}, marks=pytest.mark.slow),
    ],
)
def test_the_run_continues_bit_for_bit(tmp_path: Path, at: int, interval: int, arguments: dict[str, Any]) -> None:
    fail(tmp_path, at, interval=interval, **arguments)
    events: list[Any] = []
    trainer = trainer_of(tmp_path, **arguments)
    follow(trainer, tmp_path, interval=interval, events=events)
    trainer.train()
    assert isinstance(events[0], Restored)
    assert events[0].iteration == at // interval * interval
    assert ends_with(trainer) == uninterrupted(tmp_path, **arguments)


def test_what_a_subclass_keeps_comes_back(tmp_path: Path) -> None:
    """It lies in the containers that the subclass made; what training does not change is as the script has it."""
    fail(tmp_path, 9, kind=Counting)
    trainer = trainer_of(tmp_path, kind=Counting)
    trainer.setting = "changed"
    follow(trainer, tmp_path)
    trainer.train()
    assert ends_with(trainer) == uninterrupted(tmp_path, kind=Counting)
    assert trainer.setting == "changed"
    assert type(trainer.of_lines["train"]) is defaultdict
    assert trainer.last.maxlen == 3


def test_a_run_without_a_failure_is_that_without_cpsr(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    callback = follow(trainer, tmp_path)
    trainer.train()
    assert callback.recovery.iteration == STEPS
    assert ends_with(trainer) == uninterrupted(tmp_path)


def test_its_own_checkpoints_go_on_working(tmp_path: Path) -> None:
    """One that was saved after the restart resumes without CPSR; with CPSR, the newer state is CPSR's."""
    arguments: dict[str, Any] = {"save_strategy": "steps", "save_steps": 10}
    fail(tmp_path, 13, **arguments)
    trainer = trainer_of(tmp_path, **arguments)
    follow(trainer, tmp_path)
    trainer.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-10"))
    assert ends_with(trainer) == uninterrupted(tmp_path)
    resumed = trainer_of(tmp_path, **arguments)
    resumed.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-20"))
    assert digest(resumed) == digest(trainer)


def test_after_sigterm(tmp_path: Path) -> None:
    first = trainer_of(tmp_path)
    follow(first, tmp_path, 9, sigterm=True)
    with pytest.raises(SystemExit):
        first.train()
    events: list[Any] = []
    again = trainer_of(tmp_path)
    follow(again, tmp_path, events=events)
    again.train()
    assert events[0].lost_iterations == 0
    assert events[0].iteration >= 9
    assert ends_with(again) == uninterrupted(tmp_path)


def test_a_predicted_state(tmp_path: Path) -> None:
    """Step, schedule and data go on at the failure; the log has what the checkpoint had."""
    fail(tmp_path, 19, mode="predict", max_steps=40)
    events: list[Any] = []
    trainer = trainer_of(tmp_path, max_steps=40)
    follow(trainer, tmp_path, mode="predict", events=events)
    trainer.train()
    assert (events[0].iteration, events[0].predicted, events[0].checkpoint_iteration) == (19, True, 16)
    assert trainer.state.global_step == 40
    assert trainer.lr_scheduler.last_epoch == 40
    assert trainer.state.epoch == pytest.approx(6 + 8 / 11)
    steps = [entry["step"] for entry in log_of(trainer) if "loss" in entry]
    assert steps == [5, 10, 15, 20, 25, 30, 35, 40]


def test_other_data_is_refused(tmp_path: Path) -> None:
    fail(tmp_path, 9)
    trainer = trainer_of(tmp_path, data_seed=9)
    follow(trainer, tmp_path)
    with pytest.raises(ConfigError, match="data_seed: None, now 9"):
        trainer.train()


def test_a_finished_run_goes_on_with_more_steps(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"lr_scheduler_type": "constant", "eval_strategy": "no"}
    first = trainer_of(tmp_path, **arguments | {"max_steps": 8})
    follow(first, tmp_path)
    first.train()
    more = trainer_of(tmp_path, **arguments)
    follow(more, tmp_path)
    more.train()
    assert more.state.global_step == STEPS
    assert digest(more) == uninterrupted(tmp_path, **arguments)[0]


def test_on_another_number_of_ranks_the_global_batch_and_the_steps_of_a_pass_stay(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_steps=1)
    follow(trainer, tmp_path)
    trainer.train()
    progress = TrainerProgress(trainer, "checkpoint")
    saved: dict[str, Any] = progress.state_dict()

    def of_two_ranks(**order: Any) -> dict[str, Any]:
        return saved | {"order": saved["order"] | {"ranks": 2, "gradient_accumulation_steps": 1} | order}

    progress.load_state_dict(of_two_ranks())
    with pytest.raises(ConfigError, match=r"global_batch_size: 8, now 4.* x ranks has to be 8"):
        progress.load_state_dict(of_two_ranks(global_batch_size=8))
    with pytest.raises(ConfigError, match=r"steps_of_a_pass: 5, now 6.*without dataloader_drop_last"):
        progress.load_state_dict(of_two_ranks(steps_of_a_pass=5))
    with pytest.raises(ConfigError, match="gradient_accumulation_steps: 1, now 2"):
        progress.load_state_dict(of_two_ranks(ranks=1))


def test_what_is_refused(tmp_path: Path) -> None:
    first = trainer_of(tmp_path, save_strategy="steps", save_steps=10)
    first.train()
    late = trainer_of(tmp_path)
    follow(late, tmp_path)
    with pytest.raises(ConfigError, match="at step 10 of its own checkpoint, and the run_dir of CPSR is empty"):
        late.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-10"))
    skipping = trainer_of(tmp_path, ignore_data_skip=True)
    follow(skipping, tmp_path)
    with pytest.raises(ConfigError, match="ignore_data_skip"):
        skipping.train()
    with pytest.raises(UnsupportedEngineError, match="transformers"):
        CPSRCallback(object(), {"run_dir": str(tmp_path / "other")})
    with JournalReader(tmp_path / "cpsr" / "journal.db") as journal:
        assert {life.ending for life in journal.lives()} == {"error"}


def test_the_example_is_killed_and_comes_back(tmp_path: Path) -> None:
    killed_and_back("transformers_trainer.py", tmp_path)
    weights = [(tmp_path / life / "final" / "model.safetensors").read_bytes() for life in ("whole", "killed")]
    assert weights[0] == weights[1]
