"""Which part of a parameter each of four ranks holds, on meshes of one and of two dimensions."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.device import ON_CUDA
from tests.rank_processes import become_rank, found_by, start_ranks

RANKS = 4
LIMIT_SECONDS = 400.0


def rank_main(folder: Path, rank: int, ranks: int) -> None:
    become_rank(folder / f"{rank}.log", rank, ranks)
    torch.set_num_threads(1)
    meeting = f"file://{folder / 'meeting'}"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    found = importlib.import_module("tests.engines.four_ranks").find()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank says of its parts."""
    folder = tmp_path_factory.mktemp("four-ranks")
    return found_by(start_ranks(rank_main, folder, RANKS), folder, LIMIT_SECONDS)


def assembled(found: list[dict[str, Any]], name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole made of all ranks' parts, and how often each element is there."""
    (shape,) = {tuple(rank["parts"][name]["global_shape"]) for rank in found}
    whole, count = torch.full(shape, torch.nan), torch.zeros(shape)
    for rank in found:
        one = rank["parts"][name]
        if one["block"] is None:
            place = slice(one["offset"], one["offset"] + len(one["values"]))
            whole.view(-1)[place], count.view(-1)[place] = torch.tensor(one["values"]), count.view(-1)[place] + 1
        else:
            start = [int(index) for index in torch.unravel_index(torch.tensor(one["offset"]), shape)]
            block = tuple(slice(at, at + size) for at, size in zip(start, one["block"], strict=True))
            whole[block], count[block] = torch.tensor(one["values"]).view(one["block"]), count[block] + 1
    return whole, count


@pytest.mark.skipif(ON_CUDA, reason="four ranks of the CPU")
def test_parts_make_up_the_whole(found: list[dict[str, Any]]) -> None:
    replicas = {name: one["replicas"] for name, one in found[0]["parts"].items()}
    assert len(replicas) == 13
    assert set(replicas.values()) == {1, 2, 4}
    for name, held in replicas.items():
        whole, count = assembled(found, name)
        assert torch.equal(whole.view(-1), torch.arange(float(whole.numel()))), name
        assert bool((count == held).all()), name


@pytest.mark.skipif(ON_CUDA, reason="four ranks of the CPU")
def test_blocks_are_blocks_on_every_rank(found: list[dict[str, Any]]) -> None:
    """Also where one happens to be a range: all parts of a tensor are described alike."""
    for name in found[0]["parts"]:
        assert len({rank["parts"][name]["block"] is None for rank in found}) == 1, name
    assert found[0]["parts"]["fsdp-tp 0.weight"]["block"] is None
    assert found[0]["parts"]["fsdp-tp 1.weight"]["block"] == [4, 3]


@pytest.mark.skipif(ON_CUDA, reason="four ranks of the CPU")
def test_ranks_that_split_a_batch_and_those_that_hold_the_same(found: list[dict[str, Any]]) -> None:
    assert [rank["fsdp-tp ranks"] for rank in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [rank["hsdp ranks"] for rank in found] == [[0, 1, 2, 3]] * RANKS
    for rank, one in enumerate(found):  # each parameter is written by one of the two ranks that have it
        assert sorted([*one["writes"], *found[(rank + 2) % RANKS]["writes"]]) == ["bias", "weight"]
        assert one["portions"] == {"weight": 0.5, "bias": 0.5}
