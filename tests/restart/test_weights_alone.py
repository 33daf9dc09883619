"""What a checkpoint of weights alone can give back, and what it cannot, which is refused."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from cpsr import CPSRRecovery, TorchAdapter
from cpsr.checkpoint.catalogue import scan
from cpsr.checkpoint.memory_removal import remove_memory_states
from cpsr.checkpoint.run_directory import IDENTITY
from cpsr.errors import RecoveryError
from cpsr.restart.restore import Restored
from tests.committed import wait_until_committed

INTERVAL, WEIGHTS, FAILURE = 3, 3, 10
DATA: Any = torch.arange(30.0).reshape(-1, 1)
Mode = Literal["auto", "exact"]


class Model(nn.Module):
    """Returns its loss."""

    def __init__(self, persistent: bool | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 4)
        if persistent is not None:
            self.register_buffer("seen", torch.zeros(()), persistent=persistent)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.linear(batch / 30.0).square().mean()
        return loss


class Frozen(Model):
    """With a weight that does not train, and has the value that the script gives it."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([scale]), requires_grad=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return super().forward(batch * self.scale)


class Life:
    """A life of the job: what it registers, which data it reads, and how it ends."""

    def __init__(
        self,
        run_dir: Path,
        mode: Mode = "auto",
        *,
        model: Callable[[], nn.Module] = Model,
        data: Callable[[], Iterable[Any]] = lambda: DataLoader(DATA, batch_size=2),
        registered: dict[str, Any] | None = None,
        memory: bool = False,
    ) -> None:
        torch.manual_seed(0)
        module = model()
        optimizer = torch.optim.AdamW([one for one in module.parameters() if one.requires_grad], lr=1e-2)
        checkpoint = {"interval_iterations": INTERVAL, "fsync": False, "shared_memory": memory}
        config = {"run_dir": str(run_dir), "mode": mode, "checkpoint": checkpoint}
        self._run_dir, self._module, self._optimizer, self._data = run_dir, module, optimizer, data
        self._registered = registered or {}
        self.recovery = CPSRRecovery(TorchAdapter(module, optimizer), config)
        self.dealt: list[list[float]] = []

    def until(self, iteration: int, *, fails: bool = False) -> Restored:
        """Train up to an iteration; returns how this life began."""
        try:
            with self.recovery as recovery:
                for name, one in self._registered.items():
                    recovery.register(name, one)
                if recovery.iteration < iteration:
                    self._train(iteration)
                if fails:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        return self.recovery.restored

    def _train(self, until: int) -> None:
        began = self.recovery.iteration
        for batch in self.recovery.resume(self._data(), repeat=True):
            self.dealt.append(batch.flatten().tolist())
            self._optimizer.zero_grad()
            self._module(batch).backward()
            self._optimizer.step()
            last = self.recovery.iteration - 1
            if last > began and last % INTERVAL == 0:  # the snapshot of the step before is complete
                wait_until_committed(self._run_dir, last)
            if self.recovery.iteration >= until:
                return


def without_whole_checkpoints(run_dir: Path, **options: Any) -> list[list[float]]:
    """A life that fails, and whose whole checkpoints are damaged; the batches that it has trained on."""
    life = Life(run_dir, **options)
    life.until(FAILURE, fails=True)
    found = scan(run_dir / "checkpoints").checkpoints
    assert [(info.iteration, info.full) for info in found] == [(3, False), (6, True), (9, True)]
    for info in found[1:]:
        (info.directory / "rank-00000.moments.safetensors").write_bytes(b"rust")
    return life.dealt


def test_a_pass_goes_on_where_its_order_is_the_loaders_own(tmp_path: Path) -> None:
    dealt = without_whole_checkpoints(tmp_path)
    life = Life(tmp_path)
    restored = life.until(FAILURE)
    assert (restored.method, restored.restored_iteration, restored.predicted) == ("weights", WEIGHTS, False)
    assert life.dealt == dealt[WEIGHTS:]


def test_a_pass_in_an_order_that_is_lost_is_not_continued(tmp_path: Path) -> None:
    def shuffled() -> DataLoader[Any]:
        return DataLoader(DATA, batch_size=2, shuffle=True)

    without_whole_checkpoints(tmp_path, data=shuffled)
    for _ in range(2):
        life = Life(tmp_path, data=shuffled)
        with pytest.raises(RecoveryError, match="the order of pass 0 is lost"):
            life.until(FAILURE)
        assert life.dealt == []


def test_the_first_checkpoint_after_it_is_whole_and_labelled(tmp_path: Path) -> None:
    dealt = without_whole_checkpoints(tmp_path)
    Life(tmp_path).until(WEIGHTS)  # ends at once: what is committed of this iteration are the weights alone
    (info,) = scan(tmp_path / "checkpoints").checkpoints
    assert (info.iteration, info.full, info.label) == (WEIGHTS, True, "predicted")
    life = Life(tmp_path, "exact")
    restored = life.until(FAILURE)
    assert (restored.method, restored.restored_iteration) == ("exact", WEIGHTS)
    assert life.dealt == dealt[WEIGHTS:]


@pytest.mark.parametrize(("persistent", "refused"), [(True, True), (False, False)])
def test_a_buffer_is_not_reset_unless_the_module_makes_it_itself(
    tmp_path: Path, persistent: bool, refused: bool
) -> None:
    def model() -> Model:
        return Model(persistent)

    without_whole_checkpoints(tmp_path, model=model)
    before = sorted((tmp_path / "checkpoints").rglob("*"))
    if not refused:
        assert Life(tmp_path, model=model).until(FAILURE).method == "weights"
        return
    with pytest.raises(RecoveryError, match="training cannot go on without the module's buffer 'seen'"):
        Life(tmp_path, model=model).until(FAILURE)
    assert sorted((tmp_path / "checkpoints").rglob("*")) == before, "nothing was changed"


@pytest.mark.parametrize(("scale", "whole"), [(2.0, False), (3.0, True), (3.0, False)])
def test_frozen_weights_are_the_scripts_own_or_another_checkpoints(tmp_path: Path, scale: float, whole: bool) -> None:
    """Those of the checkpoint are gone with its moments; one that is damaged elsewhere may have them."""
    without_whole_checkpoints(tmp_path, model=lambda: Frozen(2.0))
    for file in () if whole else tmp_path.glob("checkpoints/*/*.frozen-*"):
        file.write_bytes(b"rust")
    if whole or scale == 2.0:
        module = Frozen(scale)
        assert Life(tmp_path, model=lambda: module).until(FAILURE).method == "weights"
        assert module.scale.item() == 2.0
        return
    with pytest.raises(RecoveryError, match="training cannot go on without the frozen parameter 'scale'"):
        Life(tmp_path, model=lambda: Frozen(scale)).until(FAILURE)


def test_a_registered_object_is_not_reset(tmp_path: Path) -> None:
    without_whole_checkpoints(tmp_path, registered={"noise": torch.Generator()})
    with pytest.raises(
        RecoveryError, match="training cannot go on without the tensors of the registered object 'noise'"
    ):
        Life(tmp_path, registered={"noise": torch.Generator()}).until(FAILURE)


def test_a_registered_object_without_tensors_is_restored(tmp_path: Path) -> None:
    without_whole_checkpoints(tmp_path, registered={"counters": {"best": 0.5}})
    counters = {"best": 9.0}
    assert Life(tmp_path, registered={"counters": counters}).until(FAILURE).method == "weights"
    assert counters == {"best": 0.5}


def test_mode_exact_names_the_iteration_that_auto_would_go_on_from(tmp_path: Path) -> None:
    without_whole_checkpoints(tmp_path)
    with pytest.raises(RecoveryError, match=rf"go on from weights alone, those of checkpoint {WEIGHTS}, with"):
        Life(tmp_path, "exact").until(FAILURE)
    assert Life(tmp_path).until(FAILURE).method == "weights"


def test_a_whole_state_in_memory_goes_before(tmp_path: Path) -> None:
    try:
        without_whole_checkpoints(tmp_path, memory=True)
        with pytest.raises(
            RecoveryError, match="Mode 'auto' would go on exactly, from the state of iteration 9 in memo"
        ):
            Life(tmp_path, "exact", memory=True).until(FAILURE)
        restored = Life(tmp_path, memory=True).until(FAILURE)
        assert (restored.method, restored.restored_iteration) == ("exact", 9)
    finally:
        remove_memory_states(json.loads((tmp_path / IDENTITY).read_text())["run_id"])
