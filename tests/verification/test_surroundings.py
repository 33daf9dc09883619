"""What a loop keeps beside its model is, after a repeated step, as the loop left it; no step ends a healthy job."""

import gc
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

from cpsr import CPSRRecovery
from cpsr.engines.recorded_step import RecordedStep
from cpsr.state.frozen_parameters import FrozenWeights
from cpsr.verification.evidence import Fingerprints
from cpsr.verification.repetition import MemoryRoom
from tests.device import DEVICE
from tests.situations.lives import backward
from tests.verification.loops import INTERVAL, STEPS, WORDS, Loop, trained_as_alone


class Inside(nn.Module):
    """Has another module in it, and does something before it.

    Args:
        inside: that module.
        act: gets its input, and returns what it is called with.
    """

    def __init__(self, inside: nn.Module, act: Any) -> None:
        super().__init__()
        self.inside, self.act = inside, act

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.inside(self.act(hidden))


class Around(Loop):
    """Something happens in each forward."""

    def __init__(self) -> None:
        super().__init__()
        if type(self).in_forward is not Around.in_forward:
            self.model.head = Inside(self.model.head, self.in_forward)  # type: ignore[assignment]
        self.begin_training()

    def in_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def kept(self) -> list[torch.Tensor]:
        """What the loop keeps."""
        return []

    def run(self, run_dir: Path, fraction: float, steps: int = STEPS) -> list[torch.Tensor]:
        return super().run(run_dir, fraction, steps) + [one.detach().clone() for one in self.kept()]


class DrawsFromItsOwn(Around):
    """The forward draws from a generator that the loop has registered."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = torch.Generator().manual_seed(1)

    def begin(self, recovery: CPSRRecovery) -> None:
        recovery.register("draws", self.draws)

    def in_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + 0.1 * torch.randn(hidden.shape, generator=self.draws).to(hidden)

    def kept(self) -> list[torch.Tensor]:
        return [self.draws.get_state()]


class Counts(Around):
    """The forward counts in a registered object."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"forwards": 0}

    def begin(self, recovery: CPSRRecovery) -> None:
        recovery.register("counts", self.counts)

    def in_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.counts["forwards"] += 1
        return hidden

    def kept(self) -> list[torch.Tensor]:
        return [torch.tensor(self.counts["forwards"])]


class TrainsAgainstAnother(Around):
    """A second model, whose gradients add up over three steps, and are clipped in each."""

    def __init__(self) -> None:
        super().__init__()
        self.judge = nn.Linear(WORDS, 1).to(DEVICE)
        self.of_judge = torch.optim.SGD(self.judge.parameters(), 0.1)
        self.judged = 0

    def begin(self, recovery: CPSRRecovery) -> None:
        recovery.register("judge", self.judge)
        recovery.register("of_judge", self.of_judge)

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.model(tokens)
        backward(self.judge(logits.detach()).square().mean())
        judged: torch.Tensor = self.judge(logits).square().mean()
        return functional.cross_entropy(logits, targets) - 0.01 * judged

    def clipped(self) -> list[nn.Parameter]:
        return list(self.judge.parameters())

    def before_update(self) -> None:
        nn.utils.clip_grad_norm_(self.clipped(), 0.01)
        self.judged += 1
        if self.judged % 3 == 0:
            self.of_judge.step()
            self.of_judge.zero_grad()

    def kept(self) -> list[torch.Tensor]:
        return [tensor for one in self.judge.parameters() for tensor in (one, one.grad) if tensor is not None]


class ClipsBoth(TrainsAgainstAnother):
    def clipped(self) -> list[nn.Parameter]:
        return [*super().clipped(), *self.model.parameters()]


class Follows(Around):
    """A teacher outside of the optimizer follows the model after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.model.teacher = nn.Linear(24, WORDS).requires_grad_(False).to(DEVICE)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([one for one in self.model.parameters() if one.requires_grad], 1e-2)

    def in_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        teacher: Any = self.model.teacher
        return hidden + 1e-3 * teacher(hidden).mean() if hasattr(self.model, "teacher") else hidden

    def follow(self) -> None:
        teacher: Any = self.model.teacher
        with torch.no_grad():
            for one, other in zip(teacher.parameters(), self.model.head.parameters(), strict=True):
                one.lerp_(other, 0.1)

    def after_update(self) -> None:
        self.follow()


class FollowsUncounted(Follows):
    """Through `.data`, so that torch counts no change."""

    def follow(self) -> None:
        teacher: Any = self.model.teacher
        for one, other in zip(teacher.parameters(), self.model.head.parameters(), strict=True):
            one.data.mul_(0.9).add_(other.data, alpha=0.1)


class GivesNoGradient(torch.autograd.Function):
    """Of its second input."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return given * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


class HasNoGradient(Around):
    """Of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.model.unused = nn.Parameter(torch.ones(2, device=DEVICE))
        self.begin_training()

    def in_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        apply: Any = GivesNoGradient.apply
        given: torch.Tensor = apply(hidden, self.model.unused) if hasattr(self.model, "unused") else hidden
        return given


class OfOneElement(Around):
    """A parameter of one element, whose moments torch keeps in no memory before the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.model.temperature = nn.Parameter(torch.ones(1, device=DEVICE))
        self.model.bias = nn.Parameter(torch.tensor(0.0, device=DEVICE))
        self.begin_training()

    def in_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        model: Any = self.model
        return hidden * model.temperature + model.bias if hasattr(model, "temperature") else hidden


@pytest.mark.parametrize(
    "loop", [DrawsFromItsOwn, Counts, TrainsAgainstAnother, Follows, FollowsUncounted, HasNoGradient, OfOneElement]
)
def test_a_repeated_step_leaves_no_trace_beside_the_model(loop: type[Around], tmp_path: Path) -> None:
    watched = trained_as_alone(loop, tmp_path)
    assert watched.off is None
    assert watched.verified


class Stats:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.history: list[float] = []


class KeepsAList(Around):
    """The forward appends to a list in an object that a module keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.stats = self.model.stats = Stats()  # type: ignore[assignment]
        stats = self.stats
        self.model.up.register_forward_hook(lambda *_: stats.history.append(1.0))

    def kept(self) -> list[torch.Tensor]:
        return [torch.tensor(self.stats.history)]


class CountsInAClosure(Around):
    """A hook counts, and every fourth of its calls changes the output."""

    def __init__(self) -> None:
        super().__init__()
        calls = self.calls = {"n": 0}

        def hook(module: Any, given: Any, output: torch.Tensor) -> torch.Tensor:
            calls["n"] += 1
            return output * (1.0 + 0.1 * (calls["n"] % 4 == 0))

        self.model.up.register_forward_hook(hook)

    def kept(self) -> list[torch.Tensor]:
        return [torch.tensor(self.calls["n"])]


class CountsBackwards(CountsInAClosure):
    def __init__(self) -> None:
        Around.__init__(self)
        calls = self.calls = {"n": 0}

        def hook(module: Any, given: Any, outputs: Any) -> None:
            calls["n"] += 1

        self.model.up.register_full_backward_hook(hook)


class AveragesGradients(Around):
    """A hook on each parameter adds an average of its gradients (Grokfast)."""

    def __init__(self) -> None:
        super().__init__()
        averages = self.averages = dict[torch.Tensor, torch.Tensor]()

        def hook(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            before = averages.get(parameter, torch.zeros_like(parameter))
            averages[parameter] = 0.9 * before + 0.1 * parameter.grad
            parameter.grad.add_(averages[parameter])

        for one in self.model.parameters():
            register: Any = one.register_post_accumulate_grad_hook
            register(hook)

    def kept(self) -> list[torch.Tensor]:
        return list(self.averages.values())


class DrawsUnregistered(Around):
    """The forward draws from a generator that only a closure knows."""

    def __init__(self) -> None:
        super().__init__()
        chance = self.chance = numpy.random.default_rng(1)

        def noisy(module: Any, given: Any, output: torch.Tensor) -> torch.Tensor:
            return output * (1.0 + 0.1 * float(chance.random()))

        self.model.up.register_forward_hook(noisy)

    def kept(self) -> list[torch.Tensor]:
        return [torch.tensor(self.chance.random())]


class Counted(nn.Linear):
    """Counts its calls, of all objects together."""

    calls = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        return super().forward(hidden)


class CountsInItsClass(Around):
    def __init__(self) -> None:
        super().__init__()
        self.model.head = Counted(24, WORDS).to(DEVICE)
        self.begin_training()


class KeepsIterators(Around):
    def __init__(self) -> None:
        super().__init__()
        self.model.numbers = itertools.count()  # type: ignore[assignment]
        self.model.head = Inside(self.model.head, partial(_moved, self.model.numbers))  # type: ignore[assignment]

    def kept(self) -> list[torch.Tensor]:
        numbers: Any = self.model.numbers
        return [torch.tensor(next(numbers))]


def _moved(numbers: Any, hidden: torch.Tensor) -> torch.Tensor:
    next(numbers)
    return hidden


class ReturnsAParameter(Around):
    """A hook on it would change its gradients in later steps."""

    def __init__(self) -> None:
        super().__init__()
        self.model.spread = nn.Parameter(torch.zeros(1, device=DEVICE))
        self.begin_training()
        self.model.register_forward_hook(lambda module, given, output: (output, module.spread))

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits, spread = self.model(tokens)
        of_spread: torch.Tensor = spread.square().sum() - logits.mean() * spread.sum()
        return functional.cross_entropy(logits, targets) + of_spread


class GoesBackwardTwice(Around):
    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.model(tokens)
        (0.1 * logits.square().mean()).backward(retain_graph=True)
        return functional.cross_entropy(logits, targets)


class FollowsWithinTheStep(Follows):
    def after_update(self) -> None:
        """Nothing."""

    def before_update(self) -> None:
        self.follow()


NOT_REPEATED = {
    ClipsBoth: "the loop clips gradients of other modules with those of this one",
    KeepsAList: "a step changes len(Net.stats.history), which CPSR cannot bring back",
    CountsInAClosure: "a step changes calls.n",
    CountsBackwards: "a step changes calls.n",
    AveragesGradients: "a step changes averages",
    DrawsUnregistered: "a step changes chance",
    CountsInItsClass: "a step changes Counted.calls",
    KeepsIterators: "a step changes Net.numbers",
    ReturnsAParameter: "the module returns a parameter",
    GoesBackwardTwice: "the loop goes backward through a forward more than once",
    FollowsWithinTheStep: "memory: teacher.weight (weights of the forward)",
}


@pytest.mark.parametrize("loop", NOT_REPEATED)
def test_what_cpsr_cannot_repeat_beside_the_model_is_as_the_loop_left_it(loop: type[Around], tmp_path: Path) -> None:
    watched = trained_as_alone(loop, tmp_path)
    assert watched.off is not None
    assert NOT_REPEATED[loop] in watched.off


class UpdatesWithoutGraph(Around):
    def update(self) -> None:
        with torch.no_grad():
            super().update()


def test_an_update_where_torch_records_no_graph_is_repeated(tmp_path: Path) -> None:
    watched = trained_as_alone(UpdatesWithoutGraph, tmp_path)
    assert watched.off is None
    assert watched.verified


def test_weights_outside_the_optimizer_rest_while_steps_are_repeated(tmp_path: Path) -> None:
    """Else each checkpoint would hold them, as if the loop had written to them."""

    class FollowsOnce(Follows):
        def begin(self, recovery: CPSRRecovery) -> None:
            teacher: Any = self.model.teacher
            self.recovery, self.weights = recovery, FrozenWeights(lambda: dict(teacher.named_parameters()))

        def after_update(self) -> None:
            if self.recovery.iteration == INTERVAL:
                self.follow()
                self.weights.settle()

    loop = FollowsOnce()
    loop.run(tmp_path, 1.0)
    assert loop.verified[-1] == STEPS - INTERVAL
    assert loop.weights.moved() == []


def test_an_error_while_a_step_is_recorded_leaves_the_loop_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: Fingerprints, values: torch.Tensor) -> Any:
        raise RuntimeError("no fingerprint of this")

    alone, watched = Loop(), Loop()
    expected = alone.run(tmp_path / "alone", 0.0)
    monkeypatch.setattr(Fingerprints, "__call__", failing)
    found = watched.run(tmp_path / "watched", 1.0)
    assert watched.off is not None
    assert "the step cannot be recorded (RuntimeError: no fingerprint of this)" in watched.off
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_a_loop_that_trains_on_without_cpsr_has_no_hook_of_a_recorded_step(tmp_path: Path) -> None:
    """A checkpoint was due at the last step, and the step after it is the loop's own."""
    loop = Loop()
    loop.run(tmp_path, 1.0, steps=3 * INTERVAL)
    backward(loop.loss(*(one.to(DEVICE) for one in next(iter(loop.loader)))))
    loop.update()
    gc.collect()
    assert not [one for one in gc.get_objects() if isinstance(one, RecordedStep)]


@pytest.mark.parametrize(("free_bytes", "fits"), [(799, False), (800, True)])
def test_a_step_is_repeated_only_where_the_device_has_room(
    free_bytes: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step took 900 bytes at its peak beside 100; of 300 reserved ones the loop keeps 200."""
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 100)
    room = MemoryRoom(device)
    assert MemoryRoom(torch.device("cpu")).lack() is None
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 200)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 300)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 1000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free_bytes, 10_000))
    assert (room.lack() is None) is fits
