"""Experts as they are read from the names of real models, who owns them, and the layers of all stages."""

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from deepspeed.moe.layer import MoE
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cpsr.engines.moe.deepspeed import StageLayer, by_stage
from cpsr.engines.moe.operators import (
    DEEPSPEED,
    MODULE_LIST,
    Expert,
    ExpertLayer,
    ExpertParallel,
    ModelOperators,
    check_shared,
    operators_of,
)
from cpsr.errors import ConfigError, UnsupportedEngineError

WIDTH = 4


def feed_forward() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))


class Block(nn.Module):
    def __init__(self, ffn: nn.Module) -> None:
        super().__init__()
        self.attention = nn.Linear(WIDTH, WIDTH)
        self.ffn = ffn


class PlainLayer(nn.Module):
    """A MoE layer as plain torch has it: a router, a list of experts, and shared ones."""

    def __init__(self, experts: int, shared: int = 0) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(feed_forward() for _ in range(experts))
        self.shared_experts = nn.ModuleList(feed_forward() for _ in range(shared))


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def deepspeed_model(ranks: int, use_residual: bool = False) -> nn.Module:
    """Four blocks, every other one with experts: 8 and 4."""
    sizes = {1: 8, 3: 4}
    return nn.ModuleList(
        Block(
            MoE(WIDTH, feed_forward(), num_experts=sizes[place], ep_size=ranks, use_residual=use_residual)
            if place in sizes
            else feed_forward()
        )
        for place in range(4)
    )


@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 0), (2, 1), (4, 3)])
def test_deepspeed_names_with_the_numbers_over_all_ranks(ranks: int, rank: int) -> None:
    """As its adapter gives them: DeepSpeed itself numbers the experts of each rank from 0."""

    def over_all_ranks(name: str) -> str:
        experts = {"1.": 8, "3.": 4}.get(name[:2], 0) // ranks
        return re.sub(r"(?<=deepspeed_experts\.)\d+", lambda own: str(int(own[0]) + rank * experts), name)

    own = list(map(over_all_ranks, names(deepspeed_model(ranks))))
    found = operators_of(own, DEEPSPEED, ExpertParallel(ranks, rank))
    assert found.layer_names == ("1.ffn", "3.ffn")
    experts = list(found.parameters)
    assert experts == [
        Expert(layer, index)
        for layer, total in ((0, 8), (1, 4))
        for index in range(rank * total // ranks, (rank + 1) * total // ranks)
    ]
    first = rank * 8 // ranks
    assert found.parameters[experts[0]][0] == f"1.ffn.deepspeed_moe.experts.deepspeed_experts.{first}.0.weight"
    assert [layer.experts for layer in found.layers()] == [8, 4]


def test_plain_torch_layers_with_shared_experts() -> None:
    model = nn.ModuleList([Block(PlainLayer(3, shared=2)), Block(feed_forward()), Block(PlainLayer(5))])
    found = operators_of(names(model), MODULE_LIST)
    assert found.layer_names == ("0.ffn", "2.ffn")
    assert [layer.experts for layer in found.layers()] == [3, 5]
    assert found.parameters[Expert(1, 4)][0] == "2.ffn.experts.4.0.weight"
    assert not any("shared" in name for names in found.parameters.values() for name in names)


def test_a_model_with_names_of_its_own() -> None:
    found = operators_of(["one/0", "one/1", "norm", "two/0"], re.compile(r"(?P<layer>\w+)/(?P<index>\d+)"))
    assert list(found.parameters) == [Expert(0, 0), Expert(0, 1), Expert(1, 0)]


def on_rank(experts: Iterable[int], size: int = 1, rank: int = 0, layer: str = "moe") -> ModelOperators:
    own = [f"{layer}.experts.{number}.weight" for number in experts]
    return operators_of([*own, f"{layer}.gate.weight"], MODULE_LIST, ExpertParallel(size, rank))


def refusals(ranks: list[ModelOperators | None]) -> list[str]:
    """The error of each rank, in rank order; empty where it is not refused."""
    gathered: list[Any] = []

    def collect(value: Any) -> list[Any]:
        gathered.append(json.loads(json.dumps(value)))
        raise InterruptedError

    for one in ranks:
        with pytest.raises(InterruptedError):
            check_shared(one, collect)
    found = []
    for one in ranks:
        try:
            check_shared(one, lambda _: gathered)
            found.append("")
        except (ConfigError, UnsupportedEngineError) as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize(
    ("numbers", "group", "expected"),
    [
        ((0, 3), ExpertParallel(), "0, 1"),
        ((2, 4), ExpertParallel(2, 1), "2, 3"),
        ((4, 5), ExpertParallel(2, 1), "2, 3"),
    ],
)
def test_experts_that_are_not_a_ranks_own_are_refused(
    numbers: tuple[int, ...], group: ExpertParallel, expected: str
) -> None:
    found = operators_of([f"moe.experts.{number}.weight" for number in numbers], MODULE_LIST, group)
    with pytest.raises(UnsupportedEngineError, match=rf"layer 'moe' has .* would be {expected};"):
        found.layers()


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([on_rank(range(4), 2), on_rank((4, 5), 2, 1)], "0, 1, 2, 3 on rank 0 of 2 .* would be 0, 1, 2;"),
        ([on_rank((0, 2)), on_rank((0, 2))], "0, 2 on rank 0 of 1 .* would be 0, 1; .* frozen ones too"),
        ([on_rank((0, 1)), on_rank((2, 3))], "0, 1 on rank 0 of 1 .* would be 0, 1, 2, 3;"),
        ([on_rank((0, 1), 2), on_rank((0, 1), 2)], r"no rank is 1 of its 2: .* ExpertParallel\(2, "),
        ([on_rank((0, 1)), on_rank((2, 3), 2, 1)], "rank 1 shares experts with groups of 2, and rank 0 of 1"),
        ([on_rank((0,)), on_rank((0,), layer="other")], r"rank 1 has .* \['other'\], and rank 0 \['moe'\]"),
        ([on_rank((0,)), None], r"rank 1 has the layers of experts \[\], and rank 0 \['moe'\]"),
    ],
)
def test_ranks_that_do_not_fit_together_are_refused_alike(ranks: list[ModelOperators | None], message: str) -> None:
    found = refusals(ranks)
    assert found[0] == found[1]
    assert re.search(message, found[0]), found[0]


@pytest.mark.parametrize(
    "ranks",
    [
        [None, None],
        [on_rank((0, 1, 2))] * 3,
        [on_rank((0, 1), 2), on_rank((2, 3), 2, 1), on_rank((0, 1), 2), on_rank((2, 3), 2, 1)],
        [on_rank((0,), 2), on_rank((0,), 2), on_rank((1,), 2, 1), on_rank((1,), 2, 1)],
        [on_rank((2, 3), 2, 1)],  # of a group of which this job has not all ranks nothing more is known
    ],
)
def test_ranks_that_fit_together(ranks: list[ModelOperators | None]) -> None:
    assert refusals(ranks) == [""] * len(ranks)


def test_a_stage_counts_its_layers_among_those_of_all_stages() -> None:
    """Of layers elsewhere it knows the experts, and has none of their parameters."""
    prefix = "deepspeed_moe.experts.deepspeed_experts"
    own = [f"2.{prefix}.{expert}.weight" for expert in (2, 3)]
    found = operators_of(["0.weight", "2.deepspeed_moe.gate.wg.weight", *own], DEEPSPEED, ExpertParallel(2, 1))
    whole = found.among({"1": 6, "2": 4, "5": 2})
    assert whole.layer_names == ("1", "2", "5")
    assert whole.parameters == {
        Expert(1, 2): (own[0],),
        Expert(1, 3): (own[1],),
    }
    assert whole.experts == {"1": [], "2": [2, 3], "5": []}
    assert [(layer.name, layer.experts) for layer in whole.layers()] == [("1", 6), ("2", 4), ("5", 2)]
    with pytest.raises(KeyError):
        found.among({"1": 6})


@pytest.mark.parametrize(("last", "problem"), [(3, None), (5, "whose own would be")])
def test_ranks_of_a_stage_share_its_layers(last: int, problem: str | None) -> None:
    """Two stages of two ranks: each layer is on the ranks of one of them."""
    layers = {"1": 4, "5": 2}

    def of(stage: str | None, rank: int, *experts: int) -> ModelOperators:
        names = [f"{stage}.deepspeed_moe.experts.deepspeed_experts.{expert}.weight" for expert in experts]
        return operators_of(names, DEEPSPEED, ExpertParallel(2, rank)).among(layers)

    ranks = [of("1", 0, 0, 1), of("1", 1, 2, last), of("5", 0, 0), of("5", 1, 1)]
    gathered = [[one.expert_parallel.size, one.expert_parallel.rank, list(one.experts.items())] for one in ranks]
    for one in ranks:
        if problem is None:
            check_shared(one, lambda _: gathered)
        else:
            with pytest.raises(UnsupportedEngineError, match=problem):
                check_shared(one, lambda _: gathered)


@given(st.integers(1, 6), st.integers(1, 6))
def test_every_expert_has_one_owner_and_one_turn(ranks: int, per_rank: int) -> None:
    experts = ranks * per_rank
    layers = [ExpertLayer("moe", experts, 1, ExpertParallel(ranks, rank)) for rank in range(ranks)]
    assert [index for layer in layers for index in layer.owned] == list(range(experts))
    assert all(layers[0].owner(index) == rank for rank, layer in enumerate(layers) for index in layer.owned)
    turns = [layers[0].in_turn(position) for position in range(5, 5 + experts)]
    assert sorted(turns) == list(range(experts))
    assert [layers[0].owner(index) for index in turns] == [position % ranks for position in range(5, 5 + experts)]


STAGE_LAYER = StageLayer(experts=4, expert_parallel=2, capacity_factor=1.0, drops_tokens=True)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(1, 3), st.randoms())
def test_stages_follow_each_other_whatever_the_order_of_ranks(counts: list[int], ranks: int, random: object) -> None:
    names = [[f"{stage}.{place}" for place in range(count)] for stage, count in enumerate(counts)]
    parts = [(stage, dict.fromkeys(names[stage], STAGE_LAYER)) for stage in range(len(counts)) for _ in range(ranks)]
    random.shuffle(parts)  # type: ignore[attr-defined] # hypothesis types it as an object
    assert [list(layers) for layers in by_stage(parts)] == names


def test_a_layer_of_two_stages_is_refused() -> None:
    with pytest.raises(UnsupportedEngineError, match=r"'tied\.moe' is on stages 0 and 1"):
        by_stage([(0, {"0.moe": STAGE_LAYER, "tied.moe": STAGE_LAYER}), (1, {"tied.moe": STAGE_LAYER})])


@pytest.mark.parametrize("other", [{}, {"1.moe": STAGE_LAYER}, {"0.moe": replace(STAGE_LAYER, experts=8)}])
def test_ranks_of_a_stage_have_the_same_layers(other: dict[str, StageLayer]) -> None:
    with pytest.raises(UnsupportedEngineError, match="ranks of stage 0 have different MoE layers"):
        by_stage([(0, {"0.moe": STAGE_LAYER}), (0, other), (1, {})])
