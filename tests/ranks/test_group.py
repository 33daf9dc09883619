"""The ranks agree, on real gloo processes."""

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.distributed_c10d import PrefixStore

from cpsr.errors import UnevenRanksError
from cpsr.ranks.group import Attendance
from tests.two_ranks import run

# As DeepSpeed leaves a job on GPUs: the default group is bound to a device, and the user's default device is another
# one than the CPU. `found["refused"]` names what of torch must not be called then.
BOUND = """
    found = {"refused": []}
    def refuse(module, name):
        setattr(module, name, lambda *args, **kwargs: found["refused"].append(f"{module.__name__}.{name}"))
    for name in dir(torch.cuda):
        if isinstance(getattr(torch.cuda, name), types.FunctionType):
            refuse(torch.cuda, name)
    for name in ("new_group", "all_reduce", "all_gather", "barrier", "broadcast", "isend", "irecv"):
        refuse(dist, name)
    dist.group.WORLD.bound_device_id = torch.device("cuda:0")
    torch.set_default_device("meta")
"""

SIZES = [*range(495, 510), 3000]  # around the size that takes a second collective
SCRIPT = f"SIZES = {SIZES}\n" + textwrap.dedent(
    """
    import json, os, sys, types
    import torch, torch.distributed as dist
    from cpsr.ranks.group import Group
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = {}
    # bound
    group = Group()
    found |= {
        "gather": group.gather({"rank": rank, "text": "x" * 10 * rank}),
        "broadcast": group.broadcast(["from", rank]),
        "long": [group.gather("x" * size * (rank == one)) for size in SIZES for one in (0, 1)],
        "long from 0": [group.broadcast("y" * size) for size in SIZES],
        "all": [group.all(True), group.all(rank == 0)],
        "sum": group.sum(0.5 + rank),
        "max": group.reduce(torch.tensor([rank, -rank], device="cpu"), "max").tolist(),
    }
    late = Group()  # of its own: a group in which a rank did not come cannot be used any more
    if rank == 0:
        try:
            late.reduce(torch.ones(1, device="cpu"), timeout_seconds=0.5)
            found["alone"] = "came"
        except RuntimeError:
            found["alone"] = "did not come"
    found["alone"] = group.broadcast(found.get("alone"))
    group.barrier()
    group.close()
    torch.set_default_device("cpu")
    json.dump(found, open(sys.argv[1] + f".{rank}", "w"))
    dist.destroy_process_group()  # or one exit in some twelve aborts in gloo's threads, without CPSR too
    """
)


@pytest.mark.parametrize("bound", [False, True])
def test_two_ranks(tmp_path: Path, bound: bool) -> None:
    script = SCRIPT.replace("# bound\n", textwrap.dedent(BOUND)) if bound else SCRIPT
    first, second = run(script, tmp_path)
    assert first == second
    assert first.get("refused", []) == []
    assert first["gather"] == [{"rank": 0, "text": ""}, {"rank": 1, "text": "x" * 10}]
    assert first["broadcast"] == ["from", 0]
    assert first["long"] == [["x" * size * (rank == one) for rank in (0, 1)] for size in SIZES for one in (0, 1)]
    assert first["long from 0"] == ["y" * size for size in SIZES]
    assert first["all"] == [True, False]
    assert first["sum"] == 2.0
    assert first["max"] == [1, 0]
    assert first["alone"] == "did not come"


def test_a_rank_that_waits_for_nobody_may_end_the_step_after_which_another_has_left() -> None:
    """All leave after one step with an exception: the slower ones come to its end when the first is gone."""
    store: Any = torch.distributed.HashStore()  # type: ignore[attr-defined] # torch does not export it
    first, second = (Attendance(PrefixStore("left/", store), rank, 2) for rank in range(2))
    for one in (first, second):
        one.train(100)
    first.leave(100, "SystemExit")
    second.require_all(waits=False)
    with pytest.raises(UnevenRanksError):
        second.require_all()
    second.train(101)
    with pytest.raises(UnevenRanksError):
        second.require_all(waits=False)
