"""Which rank writes what several ranks hold alike."""

from collections import Counter
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from cpsr.checkpoint.write_assignment import Holding, WriteAssignment
from cpsr.engines.moe.operators import MODULE_LIST, experts_of
from cpsr.ranks.group import Group
from cpsr.state.shard import OperatorState, ParamSlice, Shard

Sizes = st.lists(st.integers(0, 50), min_size=1, max_size=12)


def operator(name: str, size: int, offset: int = 0) -> OperatorState:
    values = torch.zeros(size)
    return OperatorState(name, ParamSlice(values, (size + offset,), offset), {"exp_avg": values.clone()}, 0)


def shard(*operators: OperatorState) -> Shard:
    return Shard({one.name: one for one in operators}, {"seen": torch.zeros(3)})


def assignments(shards: list[Shard], units: list[dict[str, str]]) -> list[WriteAssignment]:
    """What each rank makes of what all of them reported."""
    holdings = {rank: Holding.of(*own) for rank, own in enumerate(zip(shards, units, strict=True))}
    pairs = zip(shards, units, strict=True)
    return [WriteAssignment(one, mine, rank, holdings) for rank, (one, mine) in enumerate(pairs)]


def written(
    found: list[WriteAssignment], shards: list[Shard], chosen: frozenset[str] | None = None
) -> list[dict[str, OperatorState]]:
    """What each rank writes itself of a checkpoint that saves these experts."""
    pairs = zip(found, shards, strict=True)
    return [
        {name: one for name, one in own.operators.items() if name not in mine}
        for mine, own in ((one.writers(chosen), own) for one, own in pairs)
    ]


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
        units.append(experts_of(SimpleNamespace(naming=MODULE_LIST), shards[-1].operators))
    return shards, units


@given(sizes=Sizes, ranks=st.integers(1, 5))
def test_each_operator_is_written_by_one_rank_that_holds_it(sizes: list[int], ranks: int) -> None:
    shards = [shard(*(operator(f"part.{index}", size) for index, size in enumerate(sizes))) for _ in range(ranks)]
    found = assignments(shards, [{}] * ranks)
    own = written(found, shards)
    assert Counter(name for mine in own for name in mine) == dict.fromkeys(shards[0].operators, 1)
    for rank, one in enumerate(found):
        writers = one.writers(None)
        assert rank not in writers.values()
        assert all(name in own[writer] for name, writer in writers.items())
    loads = [8 * sum(one.parameter.numel for one in mine.values()) for mine in own]
    assert max(loads) <= 8 * sum(sizes) / ranks + 8 * max(sizes)


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
    found = assignments(shards, units)
    everyone = sorted({unit for mine in units for unit in mine.values()})
    fixed = [own.keys() & mine.keys() for own, mine in zip(written(found, shards), units, strict=True)]
    for _ in range(3):
        chosen = frozenset(data.draw(st.lists(st.sampled_from(everyone), unique=True)))
        own = written(found, shards, chosen)
        names = {name for one_shard in shards for name in one_shard.operators}
        assert Counter(name for mine in own for name in mine) == dict.fromkeys(names, 1)
        assert [now.keys() & mine.keys() for now, mine in zip(own, units, strict=True)] == fixed


def test_a_rank_with_experts_to_write_gets_less_of_the_rest() -> None:
    shards, units = mixture(2, 2, 4, [20, 10, 10])
    saved = frozenset(["moe/0", "moe/1"])  # of rank 0 alone: 160 of 320 bytes of the rest
    own = written(assignments(shards, units), shards, saved)
    rest = [sorted(now.keys() - mine.keys()) for now, mine in zip(own, units, strict=True)]
    assert rest == [["rest.1"], ["rest.0", "rest.2"]]


def test_slices_of_different_places_are_not_alike() -> None:
    halves = [shard(operator("weight", 5), operator("bias", 3)), shard(operator("weight", 5, 5), operator("bias", 3))]
    for one in assignments(halves, [{}, {}]):
        assert not one.writers(None)
        assert not one.replicated
    assert WriteAssignment.of(halves[0], {}, [0], Group()) is None


def test_the_share_is_what_is_written_on_average() -> None:
    shards, units = mixture(4, 2, 4, [20, 10])
    found = assignments(shards, units)
    everything = {name: one for one_shard in shards for name, one in one_shard.operators.items()}
    once = sum(8 * one.parameter.numel for one in everything.values())
    buffers = 4 * 3 * 4  # each writes its own
    assert sum(one.share_bytes for one in found) == once + buffers
    assert sum(one.non_expert_share_bytes for one in found) == 8 * 30 + buffers
