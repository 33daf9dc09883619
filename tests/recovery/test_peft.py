"""Adapters of the package peft: what a checkpoint costs is the adapters, and merging them is seen."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from cpsr import CPSRRecovery, TorchAdapter
from cpsr.benchmarks.harness.checkpoint_files import frozen_files, kind_of, rank_part
from cpsr.checkpoint.manifest import RankManifest, step_name
from cpsr.checkpoint.store import verify_run
from tests.device import DEVICE

peft = pytest.importorskip("peft")

INTERVAL, MERGED, LAST, ENDS = 3, 7, 12, 14
DATA: Any = torch.arange(40.0).reshape(-1, 4) / 40


def adapted(base_seed: int) -> nn.Module:
    """A base of a megabyte with adapters that are the same for every base."""
    torch.manual_seed(base_seed)
    base = nn.Sequential(nn.Linear(4, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 4))
    torch.manual_seed(9)
    module: nn.Module = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["2"]))
    return module.to(DEVICE)


def life(run_dir: Path, base_seed: int, until: int, *, merges: bool = False) -> nn.Module:
    """One life, which ends without a last checkpoint where it ends before the end of the run."""
    module = adapted(base_seed)
    optimizer = torch.optim.AdamW([one for one in module.parameters() if one.requires_grad], lr=1e-2)
    checkpoint = {"interval_iterations": INTERVAL, "shared_memory": False}
    config = {"run_dir": str(run_dir), "mode": "exact", "checkpoint": checkpoint}
    try:
        with CPSRRecovery(TorchAdapter(module, optimizer), config) as recovery:
            for batch in recovery.resume(DataLoader(DATA, batch_size=2), repeat=True):
                module(batch.to(DEVICE)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                assert recovery.life.saver.drain(60.0)
                if merges and recovery.iteration == MERGED:
                    module.merge_adapter()  # type: ignore[operator] # peft's; it writes into the base through `.data`
                    module.unmerge_adapter()  # type: ignore[operator] # which rounding leaves other than it was
                if recovery.iteration == until:
                    break
            if until < ENDS:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    return module


def same(one: nn.Module, other: nn.Module) -> bool:
    left, right = one.state_dict(), other.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def directory(run_dir: Path, iteration: int) -> Path:
    return run_dir / "checkpoints" / step_name(iteration)


def record(run_dir: Path, iteration: int) -> RankManifest:
    return RankManifest.parse(rank_part(directory(run_dir, iteration)).read_bytes())


@pytest.mark.parametrize(("merges", "until"), [(False, 8), (True, 13)])
def test_a_run_comes_back_and_a_checkpoint_costs_its_adapters(tmp_path: Path, merges: bool, until: int) -> None:
    """Merged ones: the checkpoint at 9 is not saved, since torch has not seen it; that at 12 has them."""
    expected = life(tmp_path / "alone", 1, ENDS, merges=merges)
    life(tmp_path / "run", 1, until, merges=merges)
    assert same(life(tmp_path / "run", 2, ENDS), expected)
    kept = record(tmp_path / "run", ENDS)
    frozen = sum(one.bytes for name, one in kept.files.items() if kind_of(name) == "frozen")
    assert frozen > 1 << 20
    assert sum(one.bytes for name, one in kept.files.items() if kind_of(name) != "frozen") < frozen / 10
    (file,) = frozen_files(directory(tmp_path / "run", ENDS))
    assert merges or file.samefile(frozen_files(directory(tmp_path / "run", LAST))[0])
    assert verify_run(tmp_path / "run") == []
