"""The rule that every engine adapter must satisfy.

Snapshot at a step -> another engine with other weights -> inject -> continue: bitwise what never stopped would give.
The rule is stated with `assert`: without them (`python -O`) nothing is checked, and `cpsr qualify` refuses to run.
"""

import json
import random
from collections.abc import Callable
from typing import Any, Protocol

import numpy
import torch
from torch import nn

from cpsr.engines import EngineAdapter
from cpsr.engines.distributed_tensors import local
from cpsr.engines.evaluation import capture_random_states, restore_random_states
from cpsr.engines.moe.operators import place_of
from cpsr.engines.optimizer_state import learning_rate
from cpsr.state.codec import SmallState, decode, encode, same
from cpsr.state.shard import bytes_of

__all__ = [
    "AFTER",
    "BEFORE",
    "OVERFLOW",
    "OVERFLOWING_STEPS",
    "Job",
    "Recorder",
    "assert_bitwise",
    "check_early_state",
    "check_resume",
    "final_state",
    "inject",
    "run",
    "seed",
    "take_snapshot",
]

BEFORE, AFTER = 3, 4  # steps before the snapshot and after it
OVERFLOWING_STEPS = (1, BEFORE + 1)  # one before the snapshot, one after it (fp16 only)
OVERFLOW = 1e30


class Recorder:
    """Records what an adapter reports; `at_step_end` lets a case act where CPSR does."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.losses: list[torch.Tensor] = []
        self.waits: list[str] = []
        self.inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.at_step_end: Callable[[int], None] = lambda iteration: None
        self.at_change: Callable[[], None] = lambda: None

    def state_changes(self) -> None:
        """The optimizer is about to change the state; follows `before_update`."""
        assert self.events[-1][0] == "before_update"
        self.at_change()

    def before_update(self) -> None:
        """An update follows."""
        self.events.append(("before_update",))

    def after_step(self, iteration: int, applied: bool) -> None:
        """A step has ended."""
        self.events.append(("after_step", iteration, applied))
        self.at_step_end(iteration)

    def on_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A training forward begins with these inputs."""
        self.inputs = args, kwargs

    def on_other_forward(self) -> None:
        """The module is called for something else."""

    def on_loss(self, loss: torch.Tensor) -> None:
        """A training forward returned this loss."""
        assert not loss.requires_grad
        self.losses.append(loss.clone())

    def before_external_load(self) -> None:
        """The user loads a checkpoint of the engine's own."""
        self.events.append(("before_external_load",))

    def after_external_load(self, iteration: int | None) -> None:
        """That checkpoint is loaded."""
        self.events.append(("after_external_load", iteration))

    def on_train_batch(self) -> None:
        """Nothing is deferred."""

    def wait_begins(self, place: str) -> None:
        """A pipeline stage waits for another."""
        self.waits.append(place)

    def wait_ends(self) -> None:
        """That wait is over."""
        self.waits.append("")

    def steps(self) -> list[tuple[int, bool]]:
        """Iteration, and whether the update was applied, of each step."""
        return [(event[1], event[2]) for event in self.events if event[0] == "after_step"]


class Boundaries:
    """Watches that the state is, until `state_changes`, what it was at the end of the step before."""

    def __init__(self, adapter: EngineAdapter, recorder: Recorder) -> None:
        self._adapter = adapter
        self.changes = 0
        self._state: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._end(adapter.iteration)
        recorder.at_change = self._change
        recorder.at_step_end = self._end

    def _change(self) -> None:
        self.changes += bool(self._state)  # more than once in a step where there are several parameter groups
        for key, now, before in self._state:
            assert torch.equal(bytes_of(now), bytes_of(before)), key
        self._state = []

    def _end(self, iteration: int) -> None:
        """Views and copies of all but the buffers, which a forward changes."""
        tensors = self._adapter.shard().tensors()
        self._state = [(key, view, view.detach().clone()) for key, view in tensors if not key.startswith("other/")]


class Job(Protocol):
    """One engine with its loop; built twice per case, with other weights the second time."""

    module: nn.Module

    @property
    def adapter(self) -> EngineAdapter:
        """The engine's."""

    def train_step(self, step: int) -> None:
        """Train one iteration on the batches of this step."""


def take_snapshot(adapter: EngineAdapter) -> dict[str, Any]:
    """What a checkpoint contains, through the same encoding."""
    tensors = {key: value.clone() for key, value in adapter.shard().all_tensors()}
    small = SmallState({"scalars": adapter.scalars(on_device=True), "random": capture_random_states(adapter)})
    small.wait()
    data, extra = encode(small.tree())
    return {"tensors": tensors, "json": json.dumps(data), "extra": extra}


def inject(adapter: EngineAdapter, snapshot: dict[str, Any]) -> None:
    """Give an engine the state of a snapshot, in the order of a restart."""
    views = dict(adapter.shard(to_fill=True).all_tensors())
    assert views.keys() == snapshot["tensors"].keys()
    for key, view in views.items():
        view.copy_(snapshot["tensors"][key])
    state = decode(json.loads(snapshot["json"]), snapshot["extra"])
    adapter.load_scalars(state["scalars"])
    adapter.push_down()
    note = restore_random_states(adapter, state["random"])
    assert note is None, note


def final_state(job: Job, recorder: Recorder) -> dict[str, Any]:
    """Copies of weights, optimizer state, buffers, losses and counters, by name."""
    state: dict[str, Any] = {f"shard/{key}": value.clone() for key, value in job.adapter.shard().all_tensors()}
    state |= {f"module/{name}": local(p).clone() for name, p in job.module.named_parameters()}
    state |= {f"loss/{index}": loss for index, loss in enumerate(recorder.losses)}
    return state | {
        "scalars": _numbers(job.adapter.scalars()),
        "rate": learning_rate(job.adapter.optimizers),
        "steps": recorder.steps(),
    }


def _numbers(scalars: dict[str, Any]) -> dict[str, Any]:
    """Without the settings that a step was seen to change: the first step of some optimizers changes more of them."""
    found = scalars.get("optimizer_state")
    if not isinstance(found, dict):
        return scalars
    return {**scalars, "optimizer_state": {key: one for key, one in found.items() if key != "changes"}}


def assert_bitwise(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare what `final_state` returned: tensors by their bytes."""
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert actual[key].dtype == value.dtype
            assert actual[key].shape == value.shape, f"{key}: {actual[key].shape} != {value.shape}"
            equal = torch.equal(bytes_of(actual[key]), bytes_of(value))
            assert equal, f"{key} differs by {(actual[key].double() - value.double()).abs().max()}"
        else:
            assert same(actual[key], value), f"{key}: {actual[key]} != {value}"


def seed(value: int) -> None:
    """Seed all global generators."""
    torch.manual_seed(value)
    numpy.random.seed(value)
    random.seed(value)


def run(job: Job, first: int, steps: int) -> None:
    """Train steps, counted from `first`."""
    for step in range(first, first + steps):
        job.train_step(step)


def check_resume(build: Callable[[], Job], skip: int = 0) -> dict[str, Any]:
    """Check one engine against the rule; the resumed engine also evaluates after each step, the other one never.

    Args:
        build: makes engine and loop with weights drawn from torch's current random state.
        skip: when positive, `skip_ahead(skip)` must give the scalars that training that many steps gave.

    Returns:
        The snapshot and the adapter's description, for checks of one case.
    """
    seed(1)
    job, recorder = build(), Recorder()
    job.adapter.attach(recorder)
    run(job, 0, BEFORE)
    assert job.adapter.iteration == BEFORE
    snapshot = take_snapshot(job.adapter)
    recorder.losses.clear()
    recorder.events.clear()
    rates = []
    boundaries = Boundaries(job.adapter, recorder)
    for step in range(BEFORE, BEFORE + AFTER):
        rates.append(learning_rate(job.adapter.optimizers))
        job.train_step(step)
        if step - BEFORE + 1 == skip:
            scalars_after_skip = job.adapter.scalars()
    expected = final_state(job, recorder)
    assert boundaries.changes >= sum(applied for _, applied in recorder.steps())
    description = job.adapter.describe()
    job.adapter.detach()

    seed(2)
    job, recorder = build(), Recorder()
    job.adapter.attach(recorder)
    check_experts(job.adapter)
    mine = dict(job.adapter.shard().tensors())
    weights = [key for key in mine if key.startswith("param/") and "bias" not in key]
    assert any(not torch.equal(mine[key], snapshot["tensors"][key]) for key in weights)
    if skip:
        inject(job.adapter, snapshot)
        assert job.adapter.skip_ahead(skip) == rates[:skip]
        assert job.adapter.scalars() == scalars_after_skip
    inject(job.adapter, snapshot)
    assert job.adapter.iteration == BEFORE
    evaluations: list[float] = []

    def evaluate(iteration: int) -> None:
        if not job.adapter.can_evaluate:
            return
        assert recorder.inputs is not None
        with job.adapter.evaluation():
            evaluations.append(job.adapter.evaluate(*recorder.inputs).item())
            # What a module might draw while it is evaluated: training must not see it.
            torch.rand(3), torch.rand(3, device=recorder.losses[-1].device), random.random(), numpy.random.rand()  # noqa: S311 - global, as a module's

    recorder.at_step_end = evaluate
    run(job, BEFORE, AFTER)
    assert_bitwise(final_state(job, recorder), expected)
    assert job.adapter.describe() == description
    job.adapter.detach()
    return {"snapshot": snapshot, "description": description, "evaluations": evaluations}


def check_experts(adapter: EngineAdapter) -> None:
    """Naming, operators and counts are of the same layers, or there are none of them."""
    if adapter.mixture is None:
        return
    naming, operators, counts = adapter.mixture.naming, adapter.mixture.operators(), adapter.mixture.token_counts()
    assert operators.layer_names == counts.layer_names
    assert operators.layer_names
    named = {name for names in operators.parameters.values() for name in names}
    assert {name for name in adapter.shard().operators if place_of(name, naming) is not None} <= named
    for expert, names in operators.parameters.items():
        assert {place.expert for name in names if (place := place_of(name, naming)) is not None} == {expert.index}
    counts.remove()
    for layer in operators.layer_names:
        adapter.mixture.scale_capacity(layer, 1.5)
        adapter.mixture.scale_capacity(layer, 1.0)


def check_early_state(build: Callable[[], Job]) -> None:
    """Optimizer state that `shard()` creates before the first step is what the optimizer would have created."""
    finals = []
    for early in (False, True):
        seed(1)
        job, recorder = build(), Recorder()
        job.adapter.attach(recorder)
        if early:
            assert job.adapter.shard().state_bytes > 0
            job.adapter.scalars()
        run(job, 0, BEFORE)
        finals.append(final_state(job, recorder))
    assert_bitwise(finals[1], finals[0])
