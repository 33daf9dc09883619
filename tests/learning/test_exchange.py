"""Ranks predict alike, on real gloo processes."""

import textwrap
from pathlib import Path

import torch

from cpsr.learning.exchange import Exchange
from cpsr.state.shard import Shard
from tests.two_ranks import run

SCRIPT = textwrap.dedent(
    """
    import json, sys
    import torch, torch.distributed as dist
    from cpsr.learning.exchange import Exchange
    from cpsr.ranks.group import Group
    from cpsr.state.shard import OperatorState, ParamSlice, Shard
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group, exchange = Group(), Exchange()
    exchange.open(group)
    eye = torch.eye(2, dtype=torch.float64)
    own = {"b": (rank + 1) * eye, ("a" if rank else "c"): torch.full((1, 1), 7.0, dtype=torch.float64)}
    found = {
        "agree": exchange.agree([rank, 5]),
        "reduce": {name: matrix.tolist() for name, matrix in exchange.reduce(own).items()},
        "nothing": exchange.reduce({}),
    }
    shared = exchange.broadcast({"updates": rank + 3, "parameters": torch.ones(2) * (rank + 1)})
    found["broadcast"] = {"updates": shared["updates"], "parameters": shared["parameters"].tolist()}
    try:
        exchange.reduce({"b": torch.zeros(rank + 1, rank + 1, dtype=torch.float64)})
    except ValueError as error:
        found["refused"] = str(error)
    def shard(offset, numel, name="w"):
        return Shard({name: OperatorState(name, ParamSlice(torch.zeros(numel), (9,), offset), {}, 0)})
    cases = [shard(4 * rank, 4), shard(3 * rank, 4), shard(0, 4, f"w{rank}"), shard(0, 9 * rank), shard(0, 9)]
    def columns(first):
        piece = ParamSlice(torch.zeros(4), (2, 4), first, (2, 2))
        return Shard({"w": OperatorState("w", piece, {}, 0)})
    found["portions"] = [exchange.portion("w")]
    for case in (cases[0], cases[-1], columns(2 * rank), columns(0)):
        exchange.count_holders(case)
        found["portions"].append(exchange.portion("w"))
    group.close()
    json.dump(found, open(sys.argv[1] + f".{rank}", "w"))
    dist.destroy_process_group()
    """
)


def test_two_ranks(tmp_path: Path) -> None:
    first, second = run(SCRIPT, tmp_path)
    assert first["agree"] == second["agree"] == [0, 1, 5]
    assert first["reduce"] == second["reduce"] == {"b": [[3.0, 0.0], [0.0, 3.0]], "a": [[7.0]], "c": [[7.0]]}
    assert first["nothing"] == second["nothing"] == {}
    assert first["broadcast"] == second["broadcast"] == {"updates": 3, "parameters": [1.0, 1.0]}
    assert first["portions"] == second["portions"] == [1.0, 1.0, 0.5, 1.0, 0.5]
    assert "'b' has [1, 2] differences" in first["refused"]
    assert first["refused"] == second["refused"]


def test_alone() -> None:
    exchange = Exchange()
    matrix = torch.ones(1, 1, dtype=torch.float64)
    assert exchange.agree([4]) == [4]
    assert exchange.reduce({"a": matrix}) == {"a": matrix}
    assert exchange.broadcast({"updates": 2}) == {"updates": 2}
    exchange.count_holders(Shard({}))
    assert exchange.portion("a") == 1.0
