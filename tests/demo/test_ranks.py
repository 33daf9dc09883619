"""Ranks of the demo and of the benchmarks: their environment, and how they join."""

import textwrap
from pathlib import Path

import pytest

from cpsr.demo.ranks import backend_of, rank_environment
from tests.two_ranks import run

# The GPU is a stand-in where there is none: what is asked is how the ranks join, and the groups that they make then.
JOIN = textwrap.dedent(
    """
    import json, os, sys
    import deepspeed, torch
    import torch.distributed as dist
    from cpsr.demo.ranks import join_ranks
    gpus = {gpus}
    if gpus:
        deepspeed.accelerator.get_accelerator().device_name = lambda index=None: "cuda"
        torch.cuda.device_count = lambda: gpus
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    join_ranks()
    ones = torch.ones(1)
    dist.all_reduce(ones)
    for rank in range(2):
        deepspeed.comm.new_group([rank])  # as DeepSpeed makes them; in a group that is bound to a GPU gloo fails here
    found = [dist.get_backend(), os.environ["LOCAL_RANK"], ones.item(), deepspeed.comm.get_world_size()]
    json.dump(found, open(sys.argv[1] + f".{{dist.get_rank()}}", "w"))
    dist.destroy_process_group()
    """
)


def test_ranks_on_the_cpu_see_no_gpu() -> None:
    assert rank_environment("cpu") == {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    assert rank_environment("cuda") == {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cuda"}


def test_nccl_needs_a_gpu_for_each_rank() -> None:
    assert [backend_of(2, gpus) for gpus in range(4)] == ["gloo", "gloo", "nccl", "nccl"]


@pytest.mark.parametrize(("gpus", "numbers"), [(0, ["0", "1"]), (1, ["0", "0"])])
def test_two_ranks_join_on_the_cpu_and_where_they_share_a_gpu(tmp_path: Path, gpus: int, numbers: list[str]) -> None:
    found = run(JOIN.format(gpus=gpus), tmp_path)
    assert list(found) == [["gloo", number, 2.0, 2] for number in numbers]
