"""Any torch optimizer is saved and restored bit for bit, from what a checkpoint says of it and not by its class."""

import copy
import inspect
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cpsr.engines import TorchAdapter
from cpsr.engines.optimizer_entry import StateEntry
from cpsr.engines.optimizer_state import learning_rate
from cpsr.errors import RunMismatchError, UnsupportedEngineError
from cpsr.state import codec
from tests.device import DEVICE
from tests.engines.optimizer_cases import (
    Alike,
    AveragingAdamW,
    Embedded,
    Job,
    Large,
    Make,
    Mixed,
    Nested,
    Stacked,
    Untried,
    check_resumed,
    differences,
    store_in,
    two_dimensional,
)

EVERY: dict[str, Any] = {
    name: kind
    for name, kind in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
REFUSED = {"LBFGS"}
# Settings under which classes keep something else, or keep it elsewhere.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "ASGD": [{"t0": 2}],
    "Adagrad": [{"initial_accumulator_value": 0.5, "lr_decay": 0.1}],
    "Adam": [{"amsgrad": True}, {"lr": torch.tensor(0.01)}],
    "AdamW": [{"amsgrad": True, "maximize": True}],
    "NAdam": [{"decoupled_weight_decay": True}],
    "RMSprop": [{"momentum": 0.9, "centered": True}],
    "SGD": [{"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.5}, {"momentum": 0.9, "nesterov": True}],
}
IMPLEMENTATIONS = ("foreach", "fused", "capturable")


def made(kind: Any, settings: dict[str, Any], module: nn.Module) -> torch.optim.Optimizer:
    matrices, _ = two_dimensional(module)
    settings = copy.deepcopy(settings)
    if kind is torch.optim.Adam and isinstance(settings.get("lr"), torch.Tensor):
        settings["foreach"] = False
    optimizer: torch.optim.Optimizer = kind(
        matrices if kind is torch.optim.Muon else module.parameters(), **({"lr": 0.01} | settings)
    )
    return optimizer


def runs_here(kind: Any, settings: dict[str, Any]) -> bool:
    """Whether torch has this implementation for the device of the tests."""
    module = nn.Linear(3, 2).to(DEVICE)
    try:
        optimizer = made(kind, settings, module)
        module(torch.ones(1, 3, device=DEVICE)).sum().backward()
        optimizer.step()
    except (RuntimeError, AssertionError):
        return False
    return True


def variants() -> list[Any]:
    found = []
    for name, kind in EVERY.items():
        taken = inspect.signature(kind).parameters
        for settings in [{}, *SETTINGS.get(name, []), *({one: True} for one in IMPLEMENTATIONS if one in taken)]:
            words = [f"{key}={value}" for key, value in settings.items()]
            for at in (3,) if settings else (0, 3):  # without state, and with
                found.append(pytest.param(name, settings, at, id="-".join([name, *words, str(at)]).replace(" ", "")))
    return found


@pytest.mark.parametrize(("name", "settings", "at"), variants())
def test_every_optimizer_of_torch_resumes_bitwise(name: str, settings: dict[str, Any], at: int, tmp_path: Path) -> None:
    if name in REFUSED:
        pytest.skip("refused by name")
    if name == "SparseAdam":
        check_resumed(partial(made, EVERY[name], settings), tmp_path, Embedded, at)
        return
    if not runs_here(EVERY[name], settings):
        pytest.skip(f"torch does not run it on {DEVICE}")
    check_resumed(partial(made, EVERY[name], settings), tmp_path, at=at)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_runs_the_module_itself_is_refused(name: str) -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(UnsupportedEngineError, match=rf"{name}\.step needs closure"):
        TorchAdapter(module, EVERY[name](module.parameters()))


OF_THEIR_OWN: dict[str, tuple[type[Any], Make]] = {
    "a subclass that keeps more": (Mixed, lambda module: AveragingAdamW(module.parameters(), lr=0.01)),
    "nested state": (Mixed, lambda module: Nested(module.parameters())),
    "stacked state": (Alike, lambda module: Stacked(module.parameters())),
    "stacked state of many shapes": (Mixed, lambda module: Stacked(module.parameters())),
    "state that grows for two steps": (Alike, lambda module: Stacked(module.parameters(), short=2)),
    "no step of a copy": (Mixed, lambda module: Untried(module.parameters())),
    "groups": (Mixed, lambda module: grouped(module)),
    "Muon and AdamW": (Mixed, lambda module: muon_and_adamw(module)),
    "three optimizers": (Mixed, lambda module: [*muon_and_adamw(module)[:1], *split(two_dimensional(module)[1])]),
}


def grouped(module: nn.Module) -> torch.optim.Optimizer:
    matrices, rest = two_dimensional(module)
    groups: Any = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 0.02, "amsgrad": True}]
    return torch.optim.AdamW(groups, lr=0.01)


def muon_and_adamw(module: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, rest = two_dimensional(module)
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


def split(parameters: list[Any]) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(parameters[:1], lr=0.1, momentum=0.9), torch.optim.Adagrad(parameters[1:], lr=0.1)]


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("case", OF_THEIR_OWN)
def test_state_of_any_kind_resumes_bitwise(case: str, at: int, tmp_path: Path) -> None:
    model, make = OF_THEIR_OWN[case]
    check_resumed(make, tmp_path, model, at)


def lion(module: nn.Module) -> torch.optim.Optimizer:
    package = pytest.importorskip("lion_pytorch")
    optimizer: torch.optim.Optimizer = package.Lion(module.parameters(), lr=1e-3, weight_decay=0.1)
    return optimizer


def eight_bits(name: str, **settings: Any) -> Make:
    def make(module: nn.Module) -> Any:
        package = pytest.importorskip("bitsandbytes")
        return getattr(package.optim, name)(module.parameters(), lr=1e-3, **settings)

    return make


def schedule_free(name: str) -> Make:
    def make(module: nn.Module) -> Any:
        package = pytest.importorskip("schedulefree")
        optimizer = getattr(package, name)(module.parameters(), lr=0.01)
        optimizer.train()
        return optimizer

    return make


def adafactor_of_transformers(module: nn.Module) -> Any:
    return pytest.importorskip("transformers.optimization").Adafactor(module.parameters(), beta1=0.9)


OF_OTHERS: dict[str, tuple[type[Any], Make]] = {
    "lion": (Mixed, lion),
    "bitsandbytes Adam8bit": (Large, eight_bits("Adam8bit")),
    "bitsandbytes AdamW8bit, small": (Mixed, eight_bits("AdamW8bit")),
    "bitsandbytes Lion8bit": (Large, eight_bits("Lion8bit")),
    "schedule-free AdamW": (Mixed, schedule_free("AdamWScheduleFree")),
    "schedule-free SGD": (Mixed, schedule_free("SGDScheduleFree")),
    "schedule-free RAdam": (Mixed, schedule_free("RAdamScheduleFree")),
    "transformers Adafactor": (Mixed, adafactor_of_transformers),
}


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("case", OF_OTHERS)
def test_optimizers_of_other_packages_resume_bitwise(case: str, at: int, tmp_path: Path) -> None:
    model, make = OF_OTHERS[case]
    check_resumed(make, tmp_path, model, at)


# What is saved


def test_a_path_on_the_disk_is_of_one_item() -> None:
    job = Job(lambda module: Nested(module.parameters()))
    assert set(job.adapter.shard().operators["up.weight"].moments) == {"x%2Ey%2Fz", "#7", "mask"}


def test_an_item_in_the_place_of_another_is_seen() -> None:
    """Also of an item that is None, as one that is absent appears to be."""
    entry: dict[str, Any] = {"before": None, "moment": torch.zeros(2)}
    known = StateEntry(entry, torch.device("cpu"), "AdamW")
    assert known.same()
    entry["after"] = entry.pop("before")
    assert not known.same()


def test_unsaveable_state_is_refused_by_name() -> None:
    job = Job(lambda module: torch.optim.AdamW(module.parameters()))
    job.train(0, 1)
    job.optimizers[0].state[job.module.up.weight]["note"] = {1.5}
    with pytest.raises(UnsupportedEngineError, match=r"AdamW keeps note: builtins\.set, which is not plain data"):
        job.adapter.scalars()
    job.optimizers[0].state[job.module.up.weight]["note"] = {"by": [{1.5}]}
    with pytest.raises(UnsupportedEngineError, match=r"cannot save optimizer\(AdamW\)\.note\.by\.0: builtins\.set"):
        job.adapter.shard()


def test_what_wraps_another_optimizer_is_refused() -> None:
    class Wrapping(torch.optim.SGD):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups[0]["params"], lr=0.1)
            self.inner = inner

    module = nn.Linear(2, 2)
    optimizer = Wrapping(torch.optim.Adam(module.parameters()))
    with pytest.raises(UnsupportedEngineError, match=r"Wrapping wraps another optimizer \(inner\)"):
        TorchAdapter(module, optimizer).shard()


def test_looking_ahead_leaves_no_trace() -> None:
    """The layout is seen on a copy: the job's own optimizer, gradients, hooks and random states are as before."""

    class Drawing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            torch.rand(3)
            return super().step(closure)

    module = nn.Linear(3, 2)
    optimizer = Drawing(module.parameters(), lr=0.1, momentum=0.9)
    optimizer.listed = [module.weight]  # type: ignore[attr-defined]  # as some keep them beside their groups
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces the instance's own `step`
    module(torch.ones(1, 3)).sum().backward()
    called: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: called.append(1))
    weights, gradients = copy.deepcopy(module.state_dict()), [one.grad for one in module.parameters()]
    group, random = dict(optimizer.param_groups[0]), torch.get_rng_state()
    adapter = TorchAdapter(module, optimizer, schedule)
    assert set(adapter.shard().operators["weight"].moments) == {"momentum_buffer"}
    assert differences(module.state_dict(), weights) == []
    assert all(one.grad is before for one, before in zip(module.parameters(), gradients, strict=True))
    assert (called, len(optimizer.state)) == ([], 0)
    assert differences(optimizer.param_groups[0], group) == []
    assert torch.equal(torch.get_rng_state(), random)


# Restarts of something else


def saved(directory: Path, make: Make) -> None:
    job = Job(make)
    job.train(0, 2)
    job.save(store_in(directory))


def adamw(module: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), **settings)


MISMATCHES: dict[str, tuple[Make, Make, type[Exception], str]] = {
    "another class": (
        adamw,
        lambda module: torch.optim.Adam(module.parameters()),
        UnsupportedEngineError,
        "the state is of AdamW, and the optimizer is Adam now",
    ),
    "another key": (
        adamw,
        partial(adamw, amsgrad=True),
        RunMismatchError,
        r"the first difference is moment/max_exp_avg_sq/",
    ),
    "one group more": (
        adamw,
        lambda module: grouped_alike(module),
        UnsupportedEngineError,
        "the saved AdamW has 1 parameter groups and this one 2",
    ),
    "another order": (
        adamw,
        lambda module: torch.optim.AdamW(list(module.parameters())[::-1]),
        UnsupportedEngineError,
        "the state was saved for scale where AdamW now has down.weight",
    ),
    "one optimizer of two": (
        lambda module: muon_and_adamw(module),
        adamw,
        RunMismatchError,
        r"the first difference is moment/.*exp_avg",
    ),
}


def grouped_alike(module: nn.Module, first: int = 3) -> torch.optim.Optimizer:
    every = list(module.parameters())
    groups: Any = [{"params": every[:first]}, {"params": every[first:]}]
    return torch.optim.AdamW(groups)


@pytest.mark.parametrize("case", MISMATCHES)
def test_a_mismatch_names_the_first_difference(case: str, tmp_path: Path) -> None:
    before, now, error, message = MISMATCHES[case]
    saved(tmp_path, before)
    job = Job(now, start=3)
    with pytest.raises(error, match=message):
        job.restore(store_in(tmp_path), 2)
    assert not any(one.state for one in job.optimizers)


# Prediction


@pytest.mark.parametrize("name", sorted(EVERY.keys() - REFUSED))
def test_which_optimizers_of_torch_can_be_predicted(name: str) -> None:
    job = Job(partial(made, EVERY[name], {}), Embedded if name == "SparseAdam" else Mixed)
    obstacle = job.adapter.prediction_obstacle()
    assert (obstacle is None) == (name not in ("ASGD", "NAdam"))
    if obstacle is not None:
        assert name in obstacle
        return
    job.train(0, 2)
    other = Job(partial(made, EVERY[name], {}), Embedded if name == "SparseAdam" else Mixed)
    other.train(0, 2)
    other.adapter.skip_ahead(3)
    job.train(2, 3)
    steps = [[one.get("step") for one in two.adapter.scalars()["optimizer_steps"]] for two in (other, job)]
    assert steps[0] == steps[1]


# Several optimizers in a loop


def test_a_step_ends_with_the_last_optimizer_and_the_last_schedule() -> None:
    module = Mixed().to(DEVICE)
    optimizers = muon_and_adamw(module)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in optimizers]
    adapter = TorchAdapter(module, tuple(optimizers), schedules)
    assert (adapter.optimizers, adapter.optimizer, adapter.loop_parts) == (optimizers, optimizers[1], schedules)
    assert adapter.describe()["optimizer"] == "Muon+AdamW"
    assert learning_rate(adapter.optimizers) == pytest.approx(0.015)
    job = Job(muon_and_adamw)
    job.adapter.detach()
    ends: list[int] = []
    job.recorder.at_step_end = ends.append
    adapter.attach(job.recorder)
    for step in range(2):
        module(torch.randn(4, 3, 5, 5, device=DEVICE)).backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):  # each with its own
            optimizer.step()
            schedule.step()
        assert ends == list(range(1, step + 2))
    assert [event[0] for event in job.recorder.events] == ["before_update", "after_step"] * 2
    rates, before = adapter.skip_ahead(1), adapter.scalars()
    assert rates == [pytest.approx(0.015 * 0.81)]
    other = Mixed().to(DEVICE)
    again = muon_and_adamw(other)
    restored = TorchAdapter(other, again, [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in again])
    restored.shard(to_fill=True)
    restored.load_scalars(codec.decode(*codec.encode(before)))
    assert [one.param_groups[0]["lr"] for one in again] == [one.param_groups[0]["lr"] for one in optimizers]
    with pytest.raises(UnsupportedEngineError, match="the saved run had 2 learning-rate schedulers"):
        TorchAdapter(other, again, torch.optim.lr_scheduler.ExponentialLR(again[0], 0.9)).load_scalars(before)


@pytest.mark.parametrize(("number", "missing"), [(0, "AdamW"), (1, "Muon")])
@pytest.mark.parametrize("again", [True, False])
def test_optimizers_step_once_each_in_any_order(number: int, missing: str, again: bool) -> None:
    job = Job(muon_and_adamw)
    job.train(0, 1)
    for one in job.optimizers[::-1]:
        one.step()
    assert job.adapter.iteration == 2
    job.optimizers[number].step()
    with pytest.raises(UnsupportedEngineError, match=rf"{missing}\.step\(\) was not called in step 3"):
        job.optimizers[number].step() if again else job.module(job.module.batch().to(DEVICE))


def test_several_optimizers_under_one_scaler(caplog: pytest.LogCaptureFixture) -> None:
    module = Mixed().to(DEVICE)
    optimizers = muon_and_adamw(module)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0)
    adapter = TorchAdapter(module, optimizers, grad_scaler=scaler)
    recorder = Job(adamw).recorder
    adapter.attach(recorder)
    with caplog.at_level(logging.WARNING):
        for factor in (1.0, float("inf"), 1.0):
            for optimizer in optimizers:
                optimizer.zero_grad()
            scaler.scale(module(torch.ones(4, 3, 5, 5, device=DEVICE)) * factor).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    assert recorder.steps() == [(1, True), (2, False), (3, True)]
    scaler.scale(module(torch.ones(4, 3, 5, 5, device=DEVICE))).backward()
    scaler.step(optimizers[0])
    with pytest.raises(UnsupportedEngineError, match=r"AdamW\.step\(\) was not called in step 4"):
        scaler.update()
