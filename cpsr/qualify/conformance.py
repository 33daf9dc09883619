"""The rule that every engine adapter must satisfy, and the tiny models that try it.

Snapshot at a step -> another engine with other weights -> inject -> go on: bitwise what never stopped would give.
"""

import json
import random
from collections.abc import Callable
from typing import Any, Protocol

import numpy
import torch
from torch import nn
from torch.nn import functional

from cpsr.engines import EngineAdapter
from cpsr.engines.moe.operators import Expert
from cpsr.experts.catching_up import CatchingUp, Missed
from cpsr.state.codec import decode, encode

VOCABULARY, WIDTH, HIDDEN = 11, 7, 13  # odd, so that partitions straddle tensors and end in padding
BATCH, LENGTH = 2, 3
BEFORE, AFTER = 3, 4  # steps before the snapshot and after it
OVERFLOWING_STEPS = (1, BEFORE + 1)  # one before the snapshot, one after it (fp16 only)
OVERFLOW = 1e30


class TinyLM(nn.Module):
    """Tied embedding, dropout, a frozen layer, and a buffer that changes in training and matters for the loss."""

    drift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.dropout = nn.Dropout(0.2)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("drift", torch.zeros(WIDTH))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, loss_factor: float = 1.0) -> torch.Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.frozen(hidden) + self.drift.to(hidden.dtype)
        hidden = hidden + self.down(self.dropout(torch.relu(self.up(hidden))))
        if self.training:
            with torch.no_grad():
                self.drift.mul_(0.9).add_(hidden.float().mean((0, 1)).to(self.drift.dtype), alpha=0.1)
        loss = functional.cross_entropy(self.head(hidden).float().flatten(0, 1), targets.flatten())
        return loss * loss_factor


class TinyMixture(nn.Module):
    """Experts beside a shared one, of which each token takes the best; `counts` says how many took which."""

    counts: torch.Tensor

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, places = self.gate(hidden).softmax(-1).max(-1)
        self.counts = torch.bincount(places.flatten(), minlength=len(self.experts))
        every = torch.stack([expert(hidden) for expert in self.experts], -2)
        taken = every.gather(-2, places[..., None, None].expand(*places.shape, 1, WIDTH)).squeeze(-2)
        output: torch.Tensor = hidden + self.shared(hidden) + weights.unsqueeze(-1) * taken
        return output


class TinyMixtures(nn.Module):
    """Two layers of experts, not equally many."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.second = TinyMixture(4), TinyMixture(3)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.second(self.first(self.embed(tokens))))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class TinyConvNet(nn.Module):
    """Convolutions in channels_last memory with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Dropout(0.2), nn.Conv2d(5, VOCABULARY, 3)
        )

    def forward(self, images: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(images).mean((2, 3))
        return {"loss": functional.cross_entropy(logits.float(), targets)}


def lay_out(module: nn.Module, memory_format: torch.memory_format) -> None:
    for parameter in module.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=memory_format)


def token_batch(step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def image_batch(step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    images = torch.randn(4, 3, 6, 6, generator=generator).to(memory_format=torch.channels_last)
    return images, torch.randint(VOCABULARY, (4,), generator=generator)


class Recorder:
    """Keeps what an adapter reports; `at_step_end` lets a case act where CPSR does."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.losses: list[torch.Tensor] = []
        self.waits: list[str] = []
        self.inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.at_step_end: Callable[[int], None] = lambda iteration: None
        self.at_change: Callable[[], None] = lambda: None

    def state_changes(self) -> None:
        assert self.events[-1][0] == "before_update"
        self.at_change()

    def before_update(self) -> None:
        self.events.append(("before_update",))

    def after_step(self, iteration: int, applied: bool) -> None:
        self.events.append(("after_step", iteration, applied))
        self.at_step_end(iteration)

    def on_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.inputs = args, kwargs

    def on_loss(self, loss: torch.Tensor) -> None:
        assert not loss.requires_grad
        self.losses.append(loss.clone())

    def before_external_load(self) -> None:
        self.events.append(("before_external_load",))

    def after_external_load(self, iteration: int) -> None:
        self.events.append(("after_external_load", iteration))

    def wait_begins(self, place: str) -> None:
        self.waits.append(place)

    def wait_ends(self) -> None:
        self.waits.append("")

    def steps(self) -> list[tuple[int, bool]]:
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
            assert torch.equal(as_bytes(now), as_bytes(before)), key
        self._state = []

    def _end(self, iteration: int) -> None:
        """Views and copies of all but the buffers, which a forward changes."""
        tensors = self._adapter.shard().tensors()
        self._state = [(key, view, view.detach().clone()) for key, view in tensors if not key.startswith("other/")]


class Job(Protocol):
    """One engine with its loop; built twice per case, with other weights the second time."""

    module: nn.Module

    @property
    def adapter(self) -> EngineAdapter: ...

    def train_step(self, step: int) -> None: ...


def random_states() -> dict[str, Any]:
    return {"torch": torch.get_rng_state(), "numpy": numpy.random.get_state(), "python": random.getstate()}


def set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    numpy.random.set_state(states["numpy"])
    random.setstate(states["python"])


def take_snapshot(adapter: EngineAdapter) -> dict[str, Any]:
    """What a checkpoint holds, through the same encoding."""
    tensors = {key: value.clone() for key, value in adapter.shard().tensors()}
    data, extra = encode({"scalars": adapter.scalars(), "random": random_states()})
    return {"tensors": tensors, "json": json.dumps(data), "extra": extra}


def inject(adapter: EngineAdapter, snapshot: dict[str, Any]) -> None:
    views = dict(adapter.shard().tensors())
    assert views.keys() == snapshot["tensors"].keys()
    for key, view in views.items():
        view.copy_(snapshot["tensors"][key])
    state = decode(json.loads(snapshot["json"]), snapshot["extra"])
    adapter.load_scalars(state["scalars"])
    adapter.push_down()
    set_random_states(state["random"])


def final_state(job: Job, recorder: Recorder) -> dict[str, Any]:
    state: dict[str, Any] = {f"shard/{key}": value.clone() for key, value in job.adapter.shard().tensors()}
    state |= {f"module/{name}": p.detach().clone() for name, p in job.module.named_parameters()}
    state |= {f"loss/{index}": loss for index, loss in enumerate(recorder.losses)}
    return state | {"scalars": job.adapter.scalars(), "rate": job.adapter.learning_rate(), "steps": recorder.steps()}


def assert_bitwise(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert actual[key].dtype == value.dtype
            assert actual[key].shape == value.shape, f"{key}: {actual[key].shape} != {value.shape}"
            same = torch.equal(as_bytes(actual[key]), as_bytes(value))
            assert same, f"{key} differs by {(actual[key].double() - value.double()).abs().max()}"
        else:
            assert actual[key] == value, f"{key}: {actual[key]} != {value}"


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def seed(value: int) -> None:
    torch.manual_seed(value)
    numpy.random.seed(value)
    random.seed(value)


def run(job: Job, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        job.train_step(step)


def check_resume(build: Callable[[], Job], skip: int = 0) -> dict[str, Any]:
    """Hold one engine to the rule; the resumed engine also evaluates after each step, the other one never.

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
        rates.append(job.adapter.learning_rate())
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
            torch.rand(3), random.random(), numpy.random.rand()

    recorder.at_step_end = evaluate
    run(job, BEFORE, AFTER)
    assert_bitwise(final_state(job, recorder), expected)
    assert job.adapter.describe() == description
    job.adapter.detach()
    return {"snapshot": snapshot, "description": description, "evaluations": evaluations}


def check_longer_steps(build: Callable[[], Job]) -> None:
    """What is written around a step of `adapter.optimizer` is what the engine and the model go on with.

    Args:
        build: as in `check_resume`.
    """
    factor, moved = 3.0, []
    for missed in (0.0, factor - 1):
        seed(1)
        job = build()
        run(job, 0, BEFORE)
        operators = job.adapter.shard().operators
        before = {name: one.parameter.values.clone() for name, one in operators.items()}
        catching_up = CatchingUp(job.adapter.optimizer)
        late = {name: Missed(one.parameter.values, missed) for name, one in operators.items()}
        catching_up.begin(late, factor)
        job.train_step(BEFORE)
        assert not catching_up.left
        moved.append({name: one.parameter.values - before[name] for name, one in operators.items()})
        model = {name: parameter.detach().clone() for name, parameter in job.module.named_parameters()}
        job.adapter.push_down()
        assert_bitwise({name: parameter.detach() for name, parameter in job.module.named_parameters()}, model)
    plain, longer = moved
    assert any(move.any() for move in plain.values())
    for name, move in plain.items():
        torch.testing.assert_close(longer[name], factor * move, rtol=1e-4, atol=1e-6, msg=name)


def check_experts(adapter: EngineAdapter) -> None:
    """Naming, operators and counts are of the same layers, or there are none of them."""
    naming, operators, counts = adapter.expert_naming(), adapter.expert_operators(), adapter.token_counts()
    if naming is None:
        assert (operators, counts) == (None, None)
        return
    assert operators is not None
    assert counts is not None
    assert operators.layer_names == counts.layer_names
    assert operators.layer_names
    named = [name for names in operators.parameters.values() for name in names]
    assert set(adapter.shard().operators) <= set(named)
    for operator, names in operators.parameters.items():
        index = operator.index if isinstance(operator, Expert) else None
        for place in map(naming.place, names):
            assert index == (None if place is None else place.expert)
    counts.remove()
    for layer in operators.layer_names:
        adapter.scale_expert_capacity(layer, 1.5)
        adapter.scale_expert_capacity(layer, 1.0)


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
