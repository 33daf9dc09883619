"""Steps of many loops are repeated: training goes on bit for bit as without, and wrong arithmetic is undone."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from cpsr import CPSRRecovery
from cpsr.journal import JournalReader
from cpsr.verification.account import Account
from tests.device import DEVICE
from tests.verification.loops import INTERVAL, STEPS, WORDS, Loop, kinds_of, trained_as_alone


class Clips(Loop):
    def before_update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)


class Accumulates(Loop):
    micro_batches = 3


class CallsTwice(Loop):
    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        more: torch.Tensor = self.model(tokens.flip(0)).square().mean()
        return super().loss(tokens, targets) + 0.01 * more


class Autocasts(Loop):
    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            return super().loss(tokens, targets)


class Draws(Loop):
    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().loss((tokens + random.randrange(3) + int(torch.randint(3, ()))) % WORDS, targets)


class Averages(Loop):
    """Of the weights, in a hook of the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.average = [one.detach().clone() for one in self.model.parameters()]
        self.optimizer.register_step_post_hook(lambda *_: self.add())

    def add(self) -> None:
        for average, one in zip(self.average, self.model.parameters(), strict=True):
            average.lerp_(one.detach(), 0.1)

    def run(self, run_dir: Path, fraction: float, steps: int = STEPS) -> list[torch.Tensor]:
        return super().run(run_dir, fraction, steps) + self.average


class OverwritesItsBatch(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.buffer = torch.empty(8, dtype=torch.int64, device=DEVICE)

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().loss(self.buffer.copy_(tokens), targets)


class SetsRates(Loop):
    def before_step(self, recovery: CPSRRecovery) -> None:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.1 / (1 + recovery.iteration)


class Clamps(Loop):
    def after_update(self) -> None:
        with torch.no_grad():
            for one in self.model.parameters():
                one.clamp_(-0.5, 0.5)


class Momentum(Loop):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)


class ZeroesEarly(Loop):
    """Before the last call of the step."""

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()


class ZeroesInPlace(ZeroesEarly):
    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self.scheduler.step()


class Evaluates(Loop):
    """After some steps, and goes back to training mode when the next step begins."""

    def before_step(self, recovery: CPSRRecovery) -> None:
        self.model.train()

    def after_update(self) -> None:
        self.model.eval()


class ScalesByIteration(Loop):
    def before_step(self, recovery: CPSRRecovery) -> None:
        self.model.scale = 1.0 + recovery.iteration / 100


class ReturnsLossAndLogits(Loop):
    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.model.targets = targets
        loss, logits = self.model(tokens)
        total: torch.Tensor = loss + 0.01 * logits.square().mean()
        return total


REPEATED = (
    ZeroesEarly, ZeroesInPlace, Evaluates, ScalesByIteration, ReturnsLossAndLogits,
    Loop, Clips, Accumulates, CallsTwice, Autocasts, Draws, Averages, OverwritesItsBatch, SetsRates, Clamps, Momentum
)  # fmt: skip


@pytest.mark.parametrize("loop", REPEATED)
def test_a_repeated_step_leaves_no_trace(loop: type[Loop], tmp_path: Path) -> None:
    watched = trained_as_alone(loop, tmp_path)
    assert watched.off is None
    assert watched.verified[-1] == STEPS - INTERVAL


class Halves(Loop):
    def before_update(self) -> None:
        for one in self.model.parameters():
            assert one.grad is not None
            one.grad.mul_(0.5)


class Shrinks(Loop):
    def before_update(self) -> None:
        with torch.no_grad():
            for one in self.model.parameters():
                one.mul_(0.999)


class Sparse(Loop):
    def make_optimizer(self) -> torch.optim.Optimizer:
        self.model.embed = nn.Embedding(WORDS, 12, sparse=True).to(DEVICE)
        return torch.optim.SGD(self.model.parameters(), 0.05)


class TrainsItsInput(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.model.embed.requires_grad_(False)
        self.model.up = nn.Linear(12, 24).to(DEVICE)
        self.optimizer = self.make_optimizer()

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        embedded = self.model.embed(tokens).requires_grad_()
        vars(self.model.embed)["forward"] = lambda given: given
        try:
            return functional.cross_entropy(self.model(embedded), targets)
        finally:
            del vars(self.model.embed)["forward"]


class NeverZeroes(Loop):
    def after_update(self) -> None:
        self.kept = [one.grad for one in self.model.parameters()]

    def before_step(self, recovery: CPSRRecovery) -> None:
        for one, kept in zip(self.model.parameters(), getattr(self, "kept", ()), strict=False):
            one.grad = kept.mul_(0.5)


class Meter:
    count = 0


class KeepsAnObject(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.model.meter = Meter()  # type: ignore[assignment]

        def count(*_: Any) -> None:
            self.model.meter.count += 1  # type: ignore[operator, union-attr]

        self.model.up.register_forward_hook(count)


NOT_REPEATED = {
    NeverZeroes: "the loop adds to gradients of the step before",
    KeepsAnObject: "a step changes Net.meter.count, which CPSR cannot bring back",
    Halves: "reduced: embed.weight",
    Shrinks: "memory: embed.weight (weights)",
    Sparse: "the gradient of embed.weight is sparse",
    TrainsItsInput: "an input of the module requires a gradient",
}


@pytest.mark.parametrize("loop", NOT_REPEATED)
def test_what_cpsr_cannot_repeat_turns_verification_off_and_trains_on(loop: type[Loop], tmp_path: Path) -> None:
    watched = trained_as_alone(loop, tmp_path)
    assert watched.off is not None
    assert NOT_REPEATED[loop] in watched.off
    assert not watched.verified


class Secret(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.model.secret = True


def test_arithmetic_that_is_not_deterministic_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = Secret()
    loop.run(tmp_path, 1.0)
    assert loop.off is not None
    assert "this arithmetic is not deterministic" in loop.off
    assert "aten.mul" in loop.off
    assert sum("verification is off" in kind for kind in kinds_of(tmp_path)) == 1


# Wrong arithmetic


class Flips(Loop):
    """Flips a bit of a weight in the memory of the device, before the forward of the steps that are repeated.

    Args:
        at: of these steps, counted from 0.
    """

    def __init__(self, *at: int) -> None:
        super().__init__()
        self.model.remembers = False  # no checkpoint has what a module keeps outside of its tensors
        self.at, self.seen = at, -1

    def before_step(self, recovery: CPSRRecovery) -> None:
        self.seen += recovery.life.verification.running
        if recovery.life.verification.running and self.seen in self.at:
            words = self.model.up.weight.data.view(-1).view(torch.int32)  # torch sees no new version
            words[7] = words[7] ^ (1 << 20)


def test_the_run_goes_back_to_its_newest_verified_state(tmp_path: Path) -> None:
    alone, cut = Flips(), Flips(2)
    expected, found = alone.run(tmp_path / "alone", 0.0), cut.run(tmp_path / "cut", 1.0)
    calls = len(alone.model.state_dict())  # their number: the loop was there twice
    assert all(torch.equal(expected[place], found[place]) for place in range(len(expected)) if place != calls)
    with JournalReader(tmp_path / "cut" / "journal.db") as reader:
        (suspected,) = reader.events("arithmetic is suspected")
        (wrong,) = reader.events("wrong arithmetic")
    assert suspected.iteration == 7
    assert "in step 7 on rank 0" in suspected.message
    assert "memory: up.weight (weights)" in suspected.message
    assert "goes back to iteration 4" in suspected.message
    assert "When the loop executed the step again, it came to the bits of its repetitions" in wrong.message
    assert list(Account.of_run(tmp_path / "cut").wrong.values()) == [1]


def test_a_second_wrong_step_of_a_single_rank_turns_verification_off(tmp_path: Path) -> None:
    """No other rank tells whether it is the device, or what the loop does in some steps."""
    cut = Flips(1, 4)
    cut.run(tmp_path, 1.0)
    assert cut.off is not None
    assert "either this loop does in some steps what CPSR does not repeat, or this device is faulty" in cut.off
    with JournalReader(tmp_path / "journal.db") as reader:
        assert len(reader.events("wrong arithmetic")) == 2


class Prunes(Loop):
    """In some steps, in which checkpoints are repeated as well."""

    def __init__(self) -> None:
        super().__init__()
        self.model.remembers = False

    def before_step(self, recovery: CPSRRecovery) -> None:
        if recovery.iteration and recovery.iteration % (3 * INTERVAL) == 0:
            self.model.up.weight.data[:2].mul_(0.5)


def test_what_a_loop_does_again_when_it_has_gone_back_is_its_own(tmp_path: Path) -> None:
    alone, cut = Prunes(), Prunes()
    expected, found = alone.run(tmp_path / "alone", 0.0), cut.run(tmp_path / "cut", 1.0)
    assert cut.off is not None
    assert "does something" in cut.off or "did something" in cut.off
    assert torch.equal(expected[0], found[0])
    assert not Account.of_run(tmp_path / "cut").wrong
    assert "wrong arithmetic" not in kinds_of(tmp_path / "cut")


def test_before_the_first_verified_checkpoint_the_run_goes_on(tmp_path: Path) -> None:
    cut = Flips(0)
    cut.run(tmp_path, 1.0)
    assert "wrong arithmetic" not in kinds_of(tmp_path)  # nothing was repeated before: the loop may do it itself
    assert cut.verified[-1] == STEPS - INTERVAL


def test_a_loop_that_cannot_execute_a_step_again_is_warned_and_goes_on(tmp_path: Path) -> None:
    """It may have done in that step what CPSR does not repeat, and then it trains on as if alone."""

    class OneShot(Clips):
        def __init__(self) -> None:
            super().__init__()
            loader = self.loader
            self.loader = batches(loader)
            self.steps = 0

        def before_update(self) -> None:
            self.steps += 1
            if self.steps == 4 * INTERVAL + 1:
                nn.utils.clip_grad_value_(self.model.parameters(), 1e-4)

    expected, found = OneShot().run(tmp_path / "alone", 0.0), OneShot().run(tmp_path / "watched", 1.0)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    with JournalReader(tmp_path / "watched" / "journal.db") as reader:
        (suspected,) = reader.events("arithmetic is suspected")
    assert "The data iterator is one-shot, so that the step cannot be executed again: training goes on" in (
        suspected.message
    )


def batches(loader: Any) -> Iterator[Any]:
    yield from loader


def test_the_newest_verified_checkpoint_stays(tmp_path: Path) -> None:
    class Verifies(Loop):
        def before_step(self, recovery: CPSRRecovery) -> None:
            if recovery.iteration == 2 * INTERVAL:
                recovery.life.verification.account.trained_seconds = -1e9  # from here on none is affordable

    loop = Verifies()
    loop.run(tmp_path, 1.0, steps=6 * INTERVAL)
    newest = loop.verified[-1]
    assert newest == 2 * INTERVAL
    whole = tmp_path / "checkpoints" / f"step-{newest:010d}" / "COMMIT"
    assert '"weights_only":false' in whole.read_text().replace(" ", "")


def test_a_budget_of_nothing_repeats_nothing(tmp_path: Path) -> None:
    loop = Loop()
    loop.run(tmp_path, 0.0)
    assert not loop.verified
    assert loop.off is None
