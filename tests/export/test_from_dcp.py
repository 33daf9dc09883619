"""Checkpoints that plain torch wrote with DCP, on one rank: what is taken, and what is refused by name."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from typer.testing import CliRunner

from cpsr import CPSRRecovery, TorchAdapter
from cpsr.cli.main import app
from cpsr.errors import CheckpointError, ConfigError, CPSRError, RunMismatchError, UnsupportedEngineError
from cpsr.export.command import run_export
from cpsr.export.import_command import run_import
from tests.device import DEVICE

BUILD: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda given: torch.optim.AdamW(given, lr=1e-2),
    "amsgrad": lambda given: torch.optim.AdamW(given, lr=1e-2, amsgrad=True),
    "sgd": lambda given: torch.optim.SGD(given, lr=1e-2, momentum=0.9),
}


class Trained:
    """A model that was trained for some steps."""

    def __init__(self, kind: str = "adamw", steps: int = 0, width: int = 4) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width)).to(DEVICE)
        self.optimizer = BUILD[kind](self.model.parameters())
        self.losses = [self.step(at) for at in range(steps)]

    def step(self, at: int) -> float:
        generator = torch.Generator().manual_seed(at)
        loss = self.model(torch.randn(5, 3, generator=generator).to(DEVICE)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def saved(self, path: Path, **changes: Any) -> Path:
        model, optim = get_state_dict(self.model, self.optimizer)
        save({"model": model, "optim": optim, **changes}, checkpoint_id=path)
        return path

    def continued(self, run_dir: Path, start: int, end: int) -> list[float]:
        """A life of the run with this model; the losses of its steps."""
        config = {"run_dir": str(run_dir), "mode": "exact", "checkpoint": {"shared_memory": False}}
        with CPSRRecovery(TorchAdapter(self.model, self.optimizer), config) as recovery:
            assert recovery.iteration == start
            return [self.step(at) for at in range(start, end)]


def test_a_failure_before_the_first_checkpoint_restarts_from_the_import(tmp_path: Path) -> None:
    Trained("adamw", 3).saved(tmp_path / "dcp")
    result = CliRunner().invoke(app, ["import", str(tmp_path / "dcp"), "--run-dir", str(tmp_path / "run")])
    assert (result.exit_code, "begins anew" in result.output) == (0, True)
    assert CliRunner().invoke(app, ["verify", str(tmp_path / "run")]).exit_code == 0
    with pytest.raises(CPSRError, match="start the job once"):
        run_export(tmp_path / "run", tmp_path / "out", "dcp", "fp32", None)
    config = {"run_dir": str(tmp_path / "run"), "mode": "exact", "checkpoint": {"shared_memory": False}}
    failing = Trained()
    with pytest.raises(ZeroDivisionError), CPSRRecovery(TorchAdapter(failing.model, failing.optimizer), config):
        assert failing.step(3) / 0
    assert Trained().continued(tmp_path / "run", 3, 5) == Trained("adamw", 5).losses[3:]


@pytest.mark.parametrize("kind", ["adamw", "amsgrad", "sgd"])
def test_any_optimizer_goes_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    whole = Trained(kind, 6)
    Trained(kind, 3).saved(tmp_path / "dcp", cpsr={"iteration": 3, "schedule": None})
    lines = run_import(tmp_path / "dcp", tmp_path / "run", None)
    assert "iteration 3" in lines[0]
    assert Trained(kind).continued(tmp_path / "run", 3, 5) == whole.losses[3:5]
    assert Trained(kind).continued(tmp_path / "run", 5, 6) == whole.losses[5:]  # its own checkpoint
    run_export(tmp_path / "run", tmp_path / "out", "dcp", "fp32", None)
    run_import(tmp_path / "out", tmp_path / "again", None)
    assert Trained(kind).continued(tmp_path / "again", 6, 7) == [Trained(kind, 7).losses[6]]


def test_a_start_that_fails_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    Trained("adamw", 2).saved(tmp_path / "dcp")
    run_import(tmp_path / "dcp", tmp_path / "run", "dcp")
    with pytest.raises(RunMismatchError, match=r"'0.bias', shape \(4,\) there and shape \(5,\) here"):
        Trained(width=5).continued(tmp_path / "run", 2, 3)
    for kind, message in (("sgd", "keeps the numbers"), ("amsgrad", "max_exp_avg_sq")):
        with pytest.raises(CPSRError, match=message):
            Trained(kind).continued(tmp_path / "run", 2, 3)
    assert len(Trained().continued(tmp_path / "run", 2, 3)) == 1


def test_a_frozen_or_absent_parameter_is_refused(tmp_path: Path) -> None:
    Trained("adamw", 2).saved(tmp_path / "dcp")
    run_import(tmp_path / "dcp", tmp_path / "run", "dcp")
    frozen = Trained()
    frozen.model[0].bias.requires_grad_(False)
    frozen.optimizer = torch.optim.AdamW([one for one in frozen.model.parameters() if one.requires_grad])
    with pytest.raises(RunMismatchError, match=r"'0.bias' is trained; the optimizer of this job does not move it"):
        frozen.continued(tmp_path / "run", 2, 3)
    more = Trained()
    more.model.add_module("head", torch.nn.Linear(4, 1))
    more.optimizer = torch.optim.AdamW(more.model.parameters())
    with pytest.raises(CPSRError, match=r"no state of AdamW was imported for head\.weight"):
        more.continued(tmp_path / "run", 2, 3)


def test_what_is_no_usable_argument_is_refused(tmp_path: Path) -> None:
    source = Trained("adamw", 1).saved(tmp_path / "dcp")
    (tmp_path / "there").mkdir()
    for run_dir, of, format_, message in (
        ("there", source, None, "nothing is ever overwritten"),
        ("run", source, "zip", "unknown format"),
        ("run", tmp_path / "absent", None, "is no directory"),
        ("run", tmp_path / "there", None, "of no known format"),
    ):
        with pytest.raises(ConfigError, match=message):
            run_import(of, tmp_path / run_dir, format_)
    assert not (tmp_path / "run").exists()


def test_what_is_not_whole_is_refused(tmp_path: Path) -> None:
    source = Trained("adamw", 1).saved(tmp_path / "dcp")
    for path in source.glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"distcp cannot be read as tensors and plain data.*Nothing was executed"):
        run_import(source, tmp_path / "run", None)
    trained = Trained("adamw", 1)
    save({"model": trained.model.state_dict(), "optim": trained.optimizer.state_dict()}, checkpoint_id=tmp_path / "raw")
    with pytest.raises(UnsupportedEngineError, match="save what get_optimizer_state_dict returns"):
        run_import(tmp_path / "raw", tmp_path / "run", None)
    (source / ".metadata").write_bytes(pickle.dumps({}))
    with pytest.raises(CheckpointError, match="is no metadata"):
        run_import(source, tmp_path / "run", None)
    assert not list(tmp_path.glob("*run*"))
