"""Ranks predict alike, on real gloo processes."""

import textwrap
from pathlib import Path

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
    group = Group()
    nothing = Shard({})
    def opened(shard, members=(0,)):
        return Exchange(group, shard, members)
    exchange = opened(nothing)
    eye = torch.eye(2, dtype=torch.float64)
    own = {"b": (rank + 1) * eye, ("a" if rank else "c"): torch.full((1, 1), 7.0, dtype=torch.float64)}
    found = {
        "agree": exchange.agree([rank, 5]),
        "reduce": {name: matrix.tolist() for name, matrix in exchange.reduce(own).items()},
        "nothing": exchange.reduce({}),
    }
    found["broadcast"] = [exchange.broadcast([rank + 3]), exchange.broadcast(torch.ones(2) * (rank + 1)).tolist()]
    try:
        exchange.reduce({"b": torch.zeros(rank + 1, rank + 1, dtype=torch.float64)})
    except ValueError as error:
        found["refused"] = str(error)
    def shard(offset, numel, name="w"):
        return Shard({name: OperatorState(name, ParamSlice(torch.zeros(numel), (9,), offset), {}, 0)})
    cases = [shard(4 * rank, 4), shard(0, 9)]
    def columns(first):
        piece = ParamSlice(torch.zeros(4), (2, 4), first, (2, 2))
        return Shard({"w": OperatorState("w", piece, {}, 0)})
    pieces = (cases[0], cases[-1], columns(2 * rank), columns(0))
    found["portions"] = [opened(case).portion("w") for case in pieces]
    sizes = {"a": 5, "b": 4, "c": 3, "d": 2}
    copies = Shard({name: OperatorState(name, ParamSlice(torch.zeros(n), (n,)), {}, 0) for name, n in sizes.items()})
    shared = opened(copies, (0, 1))
    found["mine"] = [name for name in sizes if shared.is_mine(name)]
    found["portions"].append(shared.portion("a"))
    own = opened(cases[0], (0, 1))
    found["own"] = own.is_mine("w")
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
    assert first["broadcast"] == second["broadcast"] == [[3], [1.0, 1.0]]
    assert first["portions"] == second["portions"] == [1.0, 0.5, 1.0, 0.5, 1.0]
    assert (first["mine"], second["mine"]) == (["a", "d"], ["b", "c"])
    assert (first["own"], second["own"]) == (True, True), "what ZeRO has cut in two both learn from"
    assert "'b' has [1, 2] differences" in first["refused"]
    assert first["refused"] == second["refused"]
