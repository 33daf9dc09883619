"""The own time of ranks that wait for a slow one, under each engine: real gloo ranks, one of which sleeps."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cpsr.engines.own_time import DeviceOwnTime, OwnTime
from tests.device import cpu_only
from tests.stand_in_device import StandInEvent, StandInStream, stand_in_device
from tests.two_ranks import run

SLEPT_SECONDS = 0.06
ENGINES = ("ddp", "ddp unused", "fsdp2", "tp", "zero1", "zero2", "zero3", "pipeline")

SCRIPT = f"""
import json, statistics, sys, time
import deepspeed, torch
from torch import nn
from cpsr.engines.own_time import OwnTime
from cpsr.qualify.cells import Cell
from cpsr.qualify.deepspeed_jobs import deepspeed_job
from cpsr.qualify.torch_jobs import TinyLM, TorchJob, torch_job

deepspeed.init_distributed("gloo", dist_init_required=True, verbose=False)
rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()


class WithBuffer(TinyLM):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))  # broadcast before each forward
        self.unused = nn.Linear(1, 1)


def job_of(engine):
    torch.manual_seed(0)
    if engine == "ddp unused":
        module = WithBuffer()
        called = nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)
        return TorchJob(module, torch.optim.AdamW(module.parameters()), called=called)
    if engine in ("ddp", "fsdp2", "tp"):
        return torch_job(Cell(engine, None, "fp32"), "cpu", ranks)
    kind, zero = ("pipeline", 0) if engine == "pipeline" else ("deepspeed", int(engine[-1]))
    return deepspeed_job(Cell(kind, zero, "fp32"), ranks, 1)


def own_seconds(job):
    '''Wall and own seconds of a step, and those of loading; medians.'''
    own, waits = OwnTime(), vars(torch.distributed.Work)["wait"]
    own.attach(job.adapter)
    found, before, began = [], (0, 0, 0), time.perf_counter()
    for step in range(4, 9):
        with own.loading():
            time.sleep({SLEPT_SECONDS} if rank == 0 else 0)
            torch.distributed.all_reduce(torch.ones(1))  # of ranks that agree on a batch
        job.train_step(step)
        sums, ended = own.end_step(), time.perf_counter()
        found.append([ended - began, *((now - then) / 1e6 for now, then in zip(sums[1:], before[1:]))])
        before, began = sums, ended
    own.detach()
    assert vars(torch.distributed.Work)["wait"] is waits
    return [statistics.median(one) for one in zip(*found)]


found = {{}}
for engine in {ENGINES!r}:
    job = job_of(engine)
    for step in range(1, 4):
        job.train_step(step)
    layer = next(one for one in job.module.modules() if isinstance(one, nn.Linear))
    layer.register_forward_pre_hook(lambda *_: time.sleep({SLEPT_SECONDS} if rank == 1 else 0))
    torch.distributed.barrier()
    found[engine] = own_seconds(job)
json.dump(found, open(f"{{sys.argv[1]}}.{{rank}}", "w"))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    return run(SCRIPT, tmp_path_factory.mktemp("own"))


@cpu_only("on a GPU these threads do not wait")
@pytest.mark.parametrize("engine", ENGINES)
def test_waits_are_not_own(found: tuple[Any, Any], engine: str) -> None:
    """Rank 0 loads slowly and waits for rank 1, whose forward sleeps, and which waits for rank 0's batch."""
    (wall, compute, data), (wall_1, compute_1, data_1) = found[0][engine], found[1][engine]
    assert data >= SLEPT_SECONDS
    assert compute_1 >= SLEPT_SECONDS
    assert compute < wall - 1.5 * SLEPT_SECONDS
    assert data_1 < SLEPT_SECONDS / 2
    assert compute_1 < wall_1 - SLEPT_SECONDS / 2


def test_a_rank_alone_is_not_measured() -> None:
    own = OwnTime()
    with own.loading():
        pass
    assert own.end_step() == (0, 0, 0)


def test_on_a_gpu_a_step_is_that_of_its_stream_without_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in_device() as device:
        monkeypatch.setattr(torch.cuda, "Stream", StandInStream)
        own, alone = DeviceOwnTime(torch.device("cuda", 0)), SimpleNamespace(world_size=2, wrapper=None)
        own.attach(alone)  # type: ignore[arg-type] # all that it asks for
        device.at_once, arrived = False, list[bool]()
        assert own.end_step() == (0, 0, 0)  # the next step is measured
        device.complete()
        others = StandInStream(of=device)
        device.enqueue(others, lambda: bool(arrived))
        awaited = StandInEvent(of=device)
        awaited.record(others)
        torch.cuda.current_stream().wait_event(awaited)  # type: ignore[arg-type]
        device.complete()
        time.sleep(3 * SLEPT_SECONDS)
        arrived.append(True)
        device.complete()
        with own.loading():
            time.sleep(SLEPT_SECONDS)
        assert own.end_step() == (0, 0, 0)
        device.complete()
        steps, compute, data = own.end_step()
        own.detach()
        assert steps == 1
        assert data >= SLEPT_SECONDS * 1e6
        assert compute + data < 3 * SLEPT_SECONDS * 1e6
        assert device.calls("synchronize") == []
        assert torch.cuda.Stream.wait_event.__module__ == StandInStream.__module__
