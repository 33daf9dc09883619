"""How a life ends: a loop that is left inside a step, SIGTERM to processes that it has forked."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cpsr import CPSRRecovery, TorchAdapter
from cpsr.checkpoint.catalogue import scan
from cpsr.errors import UnsupportedEngineError
from cpsr.journal import JournalReader
from tests.recovery.test_faults import CrashError, Loop, config, loader, same, train

FORK = multiprocessing.get_context("fork")
SECONDS = 30.0  # the machine may be busy


def weights(loop: Loop) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in loop.model.parameters()]


def scheduled() -> tuple[Loop, TorchAdapter, torch.optim.lr_scheduler.StepLR]:
    loop = Loop()
    schedule = torch.optim.lr_scheduler.StepLR(loop.optimizer, 2, 0.5)
    return loop, TorchAdapter(loop.model, loop.optimizer, schedule), schedule


def left_inside_a_step(run_dir: Path, final: bool = True) -> dict[int, list[torch.Tensor]]:
    """The weights after each step of a loop that ends between the optimizer and the schedule of the fifth."""
    loop, adapter, schedule = scheduled()
    after = {}
    with CPSRRecovery(adapter, config(run_dir, checkpoint={})) as recovery:
        for x, y in recovery.resume(loader(), epochs=1):
            loop.step(loop.model(x, y))
            if recovery.iteration == 4:
                break
            schedule.step()
            after[recovery.iteration] = weights(loop)
        recovery.life.saver.drain(30)
    return after


def test_a_state_inside_a_step_is_not_saved_as_that_of_the_step_before(tmp_path: Path) -> None:
    after = left_inside_a_step(tmp_path)
    with JournalReader(tmp_path / "journal.db") as journal:
        told = [event for event in journal.events() if event.kind == "left inside a step"]
    assert [event.iteration for event in told] == [4]
    assert "left inside step 5" in told[0].message
    loop, adapter, _ = scheduled()
    with CPSRRecovery(adapter, config(tmp_path)) as recovery:
        restored = recovery.restored.restored_iteration
        assert restored == 3
        assert recovery.life.loop.state.trained.batches == 3
        assert same(weights(loop), after[restored])


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_schedule_that_waits_for_the_next_batch_is_refused(tmp_path: Path) -> None:
    """That batch would count as trained; a restart would leave it out."""
    loop, adapter, schedule = scheduled()
    layers = loop.model.layers
    assert isinstance(layers, nn.Module)

    def train(recovery: CPSRRecovery) -> None:
        for x, y in recovery.resume(loader(), epochs=1):
            schedule.step()
            loop.step(nn.functional.mse_loss(layers(x), y))  # CPSR sees no forward

    expected = r"StepLR\.step\(\) was not called in step 1"
    with CPSRRecovery(adapter, config(tmp_path)) as recovery, pytest.raises(UnsupportedEngineError, match=expected):
        train(recovery)


class Interrupted(torch.optim.AdamW):
    """The user interrupts the fifth step, after it has changed the weights."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.steps += 1
        if self.steps == 5:
            raise KeyboardInterrupt


def test_an_error_of_a_step_that_the_loop_catches(tmp_path: Path) -> None:
    loop = Loop()
    loop.optimizer = Interrupted(loop.model.parameters())
    with CPSRRecovery(TorchAdapter(loop.model, loop.optimizer), config(tmp_path)) as recovery:
        for x, y in recovery.resume(loader(), epochs=1):
            try:
                loop.step(loop.model(x, y))
            except KeyboardInterrupt:
                break
    loop.optimizer = Interrupted(loop.model.parameters())
    with CPSRRecovery(TorchAdapter(loop.model, loop.optimizer), config(tmp_path)) as recovery:
        assert recovery.restored.restored_iteration == 3


def test_a_load_that_finds_nothing_changes_nothing(tmp_path: Path) -> None:
    """Also not the checkpoint that waits for the end of the iteration."""
    loop = Loop()
    with CPSRRecovery(loop.adapter, config(tmp_path, checkpoint={})) as recovery:
        for x, y in recovery.resume(loader(), epochs=1):
            loop.step(loop.model(x, y))
            if recovery.iteration == 3:
                recovery.life.before_external_load()
                recovery.life.after_external_load(None)
                assert not recovery.life.boundary.changing
            if recovery.iteration == 4:
                break
    assert 3 in [info.iteration for info in scan(tmp_path / "checkpoints").checkpoints]


def test_a_life_without_a_step_saves_what_it_has_restored(tmp_path: Path) -> None:
    """The job before has failed after its last step, and has left its newest state in memory alone."""
    memory = {"checkpoint": {"shared_memory": True, "interval_iterations": 50}, "memory": {"interval_iterations": 1}}
    loop = Loop()
    with pytest.raises(CrashError), CPSRRecovery(loop.adapter, config(tmp_path, **memory)) as recovery:
        train(recovery, loop, until=4, crash=True)
    with CPSRRecovery(Loop().adapter, config(tmp_path, **memory)) as recovery:
        restored = recovery.restored.restored_iteration
    assert restored > 0
    assert [info.iteration for info in scan(tmp_path / "checkpoints").checkpoints] == [restored]


def test_the_first_step_may_take_longer_than_others_also_after_a_load(tmp_path: Path) -> None:
    loop = Loop()
    with CPSRRecovery(loop.adapter, config(tmp_path, ranks={"step_timeout_seconds": 60.0})) as recovery:
        recovery.life.before_external_load()
        loop.adapter.load_scalars(loop.adapter.scalars() | {"iteration": 3})
        recovery.life.after_external_load(3)
        assert not any(recovery.life.boundary.liveness.check(60.0) for _ in range(20))
