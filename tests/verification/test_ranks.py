"""Steps of several ranks are repeated by every engine, without a trace."""

from pathlib import Path

import pytest

from tests import two_ranks
from tests.device import ON_CUDA

CELLS = """
import json, os, sys
from pathlib import Path

import deepspeed
import torch

from cpsr.qualify.cells import Scene, cells_of
from cpsr.recovery import CPSRRecovery
from cpsr.verification.account import Account

MICRO_BATCHES, STEPS, INTERVAL = 2, 8, 2
deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
torch.distributed.init_process_group("gloo")
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])

def trained(cell, fraction):
    run_dir = folder.with_name(f"{cell.name.replace(' ', '-')}-{fraction:g}")
    if rank == 0:
        run_dir.mkdir()
        Account(trained_seconds=1e9).save(run_dir)
    torch.manual_seed(1)
    job = Scene(torch.device("cpu"), rank, 2, 2, folder).builder(cell, MICRO_BATCHES, "cosine")()
    torch.manual_seed(2 + rank)
    config = {"run_dir": run_dir, "mode": "exact", "checkpoint": {"interval_iterations": INTERVAL},
              "memory": {"interval_iterations": 10**6}, "verification": {"budget_fraction": fraction}}
    with CPSRRecovery(job.adapter, config) as recovery:
        for step in range(STEPS):
            recovery.life.saver.drain(30.0)
            job.train_step(step)
        state = {key: values.detach().clone() for key, values in job.adapter.shard().tensors()}
    return state, torch.get_rng_state(), Account.of_run(run_dir)

found = {}
for cell in cells_of("cpu", 2, True):
    (one, random, _), (other, other_random, account) = trained(cell, 0.0), trained(cell, 1.0)
    same = all(torch.equal(one[key].view(torch.uint8), other[key].view(torch.uint8)) for key in one)
    found[cell.name] = same and torch.equal(random, other_random), account.verified
Path(f"{folder}.{rank}").write_text(json.dumps(found))
torch.distributed.destroy_process_group()
"""
NOT_REPEATED = ("ddp fp16", "pipeline")


@pytest.mark.skipif(ON_CUDA, reason="a script of the CPU")
def test_each_engine_repeats_its_steps_without_a_trace(tmp_path: Path) -> None:
    first, second = two_ranks.run(CELLS, tmp_path)
    assert len(first) > 20
    for name, (same, verified) in first.items():
        assert same, name
        assert second[name][0], name
        assert bool(verified) is not name.startswith(NOT_REPEATED), name
