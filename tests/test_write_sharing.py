"""Which rank writes what several ranks hold alike."""

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from cpsr.experts.naming import MODULE_LIST, experts_of
from cpsr.group import Group
from cpsr.state import OperatorState, ParamSlice, Shard
from cpsr.write_sharing import Holding, WriteSharing

Sizes = st.lists(st.integers(0, 50), min_size=1, max_size=12)


def operator(name: str, size: int, offset: int = 0) -> OperatorState:
    values = torch.zeros(size)
    return OperatorState(name, ParamSlice(values, (size + offset,), offset), {"exp_avg": values.clone()}, 0)


def shard(*operators: OperatorState) -> Shard:
    return Shard({one.name: one for one in operators}, {"seen": torch.zeros(3)})


def sharings(shards: list[Shard], units: list[dict[str, str]]) -> list[WriteSharing]:
    """What each rank makes of what all of them told."""
    holdings = {rank: Holding.of(*held) for rank, held in enumerate(zip(shards, units, strict=True))}
    return [WriteSharing(one, mine, rank, holdings) for rank, (one, mine) in enumerate(zip(shards, units, strict=True))]


def mixture(
    ranks: int, expert_parallel: int, experts: int, rest: list[int]
) -> tuple[list[Shard], list[dict[str, str]]]:
    """Ranks of an expert-parallel job: all of the rest, and some of the experts each."""
    shards, units = [], []
    each = experts // expert_parallel
    for rank in range(ranks):
        first = (rank % expert_parallel) * each
        names = [f"moe.experts.{index}.weight" for index in range(first, first + each)]
        parts = [operator(f"rest.{index}", size) for index, size in enumerate(rest)]
        shards.append(shard(*parts, *(operator(name, 10) for name in names)))
        units.append(experts_of(MODULE_LIST, shards[-1].operators))
    return shards, units


@given(sizes=Sizes, ranks=st.integers(1, 5))
def test_each_operator_is_written_by_one_rank_that_holds_it(sizes: list[int], ranks: int) -> None:
    shards = [shard(*(operator(f"part.{index}", size) for index, size in enumerate(sizes))) for _ in range(ranks)]
    told = [one.shared(None) for one in sharings(shards, [{}] * ranks)]
    written = Counter(name for one, held in zip(told, shards, strict=True) for name in one.own(held).operators)
    assert written == dict.fromkeys(shards[0].operators, 1)
    for rank, one in enumerate(told):
        assert rank not in one.writers.values()
        for name, writer in one.writers.items():
            assert name in told[writer].own(shards[writer]).operators
    loads = [
        8 * sum(held.numel for held in map(_slice, one.own(held).operators.values()))
        for one, held in zip(told, shards, strict=True)
    ]
    assert max(loads) <= 8 * sum(sizes) / ranks + 8 * max(sizes)


def _slice(one: OperatorState) -> ParamSlice:
    return one.parameter


@given(
    data=st.data(),
    expert_parallel=st.sampled_from([1, 2, 4]),
    replicas=st.integers(1, 2),
    rest=Sizes,
    each=st.integers(1, 3),
)
def test_experts_are_written_once_by_the_same_rank_whatever_is_chosen(
    data: st.DataObject, expert_parallel: int, replicas: int, rest: list[int], each: int
) -> None:
    ranks, experts = expert_parallel * replicas, each * expert_parallel
    shards, units = mixture(ranks, expert_parallel, experts, rest)
    found = sharings(shards, units)
    everyone = sorted({unit for mine in units for unit in mine.values()})
    fixed = [
        one.shared(None).own(held).operators.keys() & mine.keys()
        for one, held, mine in zip(found, shards, units, strict=True)
    ]
    for _ in range(3):
        chosen = frozenset(data.draw(st.lists(st.sampled_from(everyone), unique=True)))
        told = [one.shared(chosen) for one in found]
        written = Counter(name for one, held in zip(told, shards, strict=True) for name in one.own(held).operators)
        assert written == dict.fromkeys({name for held in shards for name in held.operators}, 1)
        for one, held, mine, always in zip(told, shards, units, fixed, strict=True):
            assert one.own(held).operators.keys() & mine.keys() == always
            assert one.carried == {name for name in one.writers.keys() & mine.keys() if mine[name] not in chosen}


def test_a_rank_with_experts_to_write_gets_less_of_the_rest() -> None:
    shards, units = mixture(2, 2, 4, [20, 10, 10])
    saved = frozenset(["moe/0", "moe/1"])  # of rank 0 alone: 160 of 320 bytes of the rest
    told = [one.shared(saved) for one in sharings(shards, units)]
    own = [
        sorted(one.own(held).operators.keys() - mine.keys())
        for one, held, mine in zip(told, shards, units, strict=True)
    ]
    assert own == [["rest.1"], ["rest.0", "rest.2"]]


def test_slices_of_different_places_are_not_alike() -> None:
    halves = [shard(operator("weight", 5), operator("bias", 3)), shard(operator("weight", 5, 5), operator("bias", 3))]
    for one in sharings(halves, [{}, {}]):
        assert one.shared(None).writers == {}
    assert WriteSharing.of(halves[0], {}, [0], Group()) is None


def test_the_share_is_what_is_written_on_average() -> None:
    shards, units = mixture(4, 2, 4, [20, 10])
    found = sharings(shards, units)
    everything = {name: one for held in shards for name, one in held.operators.items()}
    once = sum(8 * one.parameter.numel for one in everything.values())
    buffers = 4 * 3 * 4  # each writes its own
    assert sum(one.share_bytes for one in found) == once + buffers
    assert sum(one.non_expert_share_bytes for one in found) == 8 * 30 + buffers
