"""Operators as they are read from the names of real models."""

import json
import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from deepspeed.moe.layer import MoE
from torch import nn

from cpsr.engines.moe.operators import (
    DEEPSPEED,
    MODULE_LIST,
    Expert,
    ExpertParallel,
    Gate,
    ModelOperators,
    NonExpert,
    Place,
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
    experts = [operator for operator in found.parameters if isinstance(operator, Expert)]
    assert experts == [
        Expert(layer, index)
        for layer, total in ((0, 8), (1, 4))
        for index in range(rank * total // ranks, (rank + 1) * total // ranks)
    ]
    first = rank * 8 // ranks
    assert found.parameters[experts[0]][0] == f"1.ffn.deepspeed_moe.experts.deepspeed_experts.{first}.0.weight"
    assert [layer.experts for layer in found.layers(dict.fromkeys(own, 1))] == [8, 4]
    assert found.parameters[Gate(1)] == ("3.ffn.deepspeed_moe.gate.wg.weight",)
    assert found.parameters[NonExpert("0.attention")] == ("0.attention.weight", "0.attention.bias")


def test_the_residual_branch_of_deepspeed_is_a_part_that_every_token_passes() -> None:
    found = operators_of(names(deepspeed_model(1, use_residual=True)), DEEPSPEED)
    assert {NonExpert("1.ffn.mlp.0"), NonExpert("1.ffn.coefficient")} <= set(found.parameters)


@pytest.mark.parametrize("ranks", [1, 2])
def test_layers_have_the_size_that_their_experts_have(ranks: int) -> None:
    model = deepspeed_model(ranks)
    sizes = {name: 12 * parameter.numel() for name, parameter in model.named_parameters()}
    found = operators_of(sizes, DEEPSPEED, ExpertParallel(ranks))
    layers = found.layers(sizes)
    assert [layer.experts for layer in layers] == [8, 4]
    expert = 12 * sum(parameter.numel() for parameter in feed_forward().parameters())
    assert [layer.expert_bytes for layer in layers] == [expert, expert]
    assert sum(found.bytes_of(sizes).values()) == sum(sizes.values())


def test_plain_torch_layers_with_shared_experts() -> None:
    model = nn.ModuleList([Block(PlainLayer(3, shared=2)), Block(feed_forward()), Block(PlainLayer(5))])
    found = operators_of(names(model), MODULE_LIST)
    assert found.layer_names == ("0.ffn", "2.ffn")
    assert [layer.experts for layer in found.layers(dict.fromkeys(names(model), 1))] == [3, 5]
    assert found.parameters[Expert(1, 4)][0] == "2.ffn.experts.4.0.weight"
    assert found.parameters[Gate(0)] == ("0.ffn.gate.weight",)
    assert NonExpert("0.ffn.shared_experts.1.0") in found.parameters
    assert NonExpert("1.ffn.0") in found.parameters


@pytest.mark.parametrize("path", ["moe.shared", "shared", "moe.mlp_shared"])
def test_a_list_of_shared_experts_is_a_part_that_every_token_passes(path: str) -> None:
    found = operators_of([f"{path}.experts.0.weight", "moe.experts.0.weight", "moe.gate.weight"], MODULE_LIST)
    assert list(found.parameters) == [NonExpert(f"{path}.experts.0"), Expert(0, 0), Gate(0)]
    assert found.layer_names == ("moe",)


@pytest.mark.parametrize("gate", [[], ["moe.w_gate"], ["moe.wg.weight"], ["gate.weight"]])
def test_gates_need_no_parameters_and_no_such_name(gate: list[str]) -> None:
    """Some route by hashing; what is not known as a gate is saved with every checkpoint all the same."""
    found = operators_of([*gate, "moe.experts.0.weight", "moe.experts.1.weight"], MODULE_LIST)
    assert found.layer_names == ("moe",)
    assert [one for one in found.parameters if isinstance(one, Expert)] == [Expert(0, 0), Expert(0, 1)]
    assert not any(isinstance(one, Gate) for one in found.parameters)


def test_a_model_that_is_the_layer() -> None:
    found = operators_of(names(PlainLayer(2)), MODULE_LIST)
    assert found.layer_names == ("",)
    assert set(found.parameters) == {Gate(0), Expert(0, 0), Expert(0, 1)}


def test_every_parameter_belongs_to_one_operator() -> None:
    model = nn.ModuleList([Block(PlainLayer(3, shared=1)), Block(feed_forward())])
    model.register_parameter("scale", nn.Parameter(torch.zeros(1)))
    found = operators_of(names(model), MODULE_LIST)
    assert sorted(name for own in found.parameters.values() for name in own) == sorted(names(model))
    assert found.parameters[NonExpert("scale")] == ("scale",)


def test_a_gate_without_experts_is_an_ordinary_module() -> None:
    found = operators_of(["mlp.gate.weight", "mlp.up.weight"], MODULE_LIST)
    assert list(found.parameters) == [NonExpert("mlp.gate"), NonExpert("mlp.up")]
    assert found.layers({"mlp.gate.weight": 1, "mlp.up.weight": 1}) == ()


def test_experts_may_have_a_gate_of_their_own() -> None:
    found = operators_of(["moe.experts.0.gate.weight", "moe.experts.1.gate.weight", "moe.gate.weight"], MODULE_LIST)
    assert found.parameters[Expert(0, 0)] == ("moe.experts.0.gate.weight",)
    assert found.parameters[Gate(0)] == ("moe.gate.weight",)


def test_a_router_that_is_a_parameter_of_the_layer() -> None:
    found = operators_of(["moe.experts.0.up", "moe.router"], MODULE_LIST)
    assert found.parameters[Gate(0)] == ("moe.router",)


def test_stacked_experts_are_saved_whole() -> None:
    found = operators_of(["moe.experts.up", "moe.experts.down", "moe.router"], MODULE_LIST)
    assert list(found.parameters) == [NonExpert("moe.experts"), NonExpert("moe")]


def test_a_model_with_names_of_its_own() -> None:
    class Lettered:
        def place(self, parameter: str) -> Place | None:
            head, _, letter = parameter.partition("/")
            return Place(head, "abc".index(letter)) if letter else None

    found = operators_of(["one/a", "one/b", "norm", "two/a"], Lettered())
    assert list(found.parameters) == [Expert(0, 0), Expert(0, 1), NonExpert("norm"), Expert(1, 0)]


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
    sizes = {f"moe.experts.{number}.weight": 1 for number in numbers}
    found = operators_of(sizes, MODULE_LIST, group)
    with pytest.raises(UnsupportedEngineError, match=rf"layer 'moe' has .* and so many .* would be {expected};"):
        found.layers(sizes)


def test_numbers_that_begin_anew_on_each_rank_are_refused() -> None:
    """A name would stand for another expert on each rank, and pass for a replica of it."""
    message = (
        r"experts 0, 1 on rank 1 of 2 expert-parallel ranks.* numbers over all ranks.* begin at 2.* leave expert_par"
    )
    with pytest.raises(UnsupportedEngineError, match=message):
        on_rank((0, 1), 2, 1).layers({"moe.experts.0.weight": 1, "moe.experts.1.weight": 1, "moe.gate.weight": 1})
    for ranks in ([(0, 1), (0, 1)], [(0, 1, 2), (0, 1, 2)], [range(8), range(8)]):
        found = refusals([on_rank(own, 2, rank) for rank, own in enumerate(ranks)])
        assert found[0] == found[1]
        assert f"experts {', '.join(map(str, ranks[1]))} on rank 1 of 2" in found[0]


def test_a_size_that_does_not_divide_is_refused_on_all_ranks() -> None:
    found = refusals([on_rank(own, 3, rank) for rank, own in enumerate([(0, 1, 2), (3, 4, 5), (6, 7)])])
    message = (
        "layer 'moe' has 8 experts, which 3 expert-parallel ranks cannot share equally; sizes that can: 1, 2, 4, 8"
    )
    assert found == [message] * 3


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


def test_a_name_that_comes_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="named twice"):
        operators_of(["norm.weight", "norm.weight"], MODULE_LIST)


def test_a_size_that_is_not_known_is_named() -> None:
    with pytest.raises(KeyError, match=r"norm\.weight"):
        operators_of(["norm.weight"], MODULE_LIST).bytes_of({})


def test_experts_of_no_bytes_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one byte"):
        operators_of(["moe.experts.0.weight"], MODULE_LIST).layers({"moe.experts.0.weight": 0})


def test_a_stage_counts_its_layers_among_those_of_all_stages() -> None:
    """Of layers elsewhere it knows the experts, and has none of their parameters."""
    prefix = "deepspeed_moe.experts.deepspeed_experts"
    own = [f"2.{prefix}.{expert}.weight" for expert in (2, 3)]
    found = operators_of(["0.weight", "2.deepspeed_moe.gate.wg.weight", *own], DEEPSPEED, ExpertParallel(2, 1))
    whole = found.among({"1": 6, "2": 4, "5": 2})
    assert whole.layer_names == ("1", "2", "5")
    assert whole.parameters == {
        NonExpert("0"): ("0.weight",),
        Gate(1): ("2.deepspeed_moe.gate.wg.weight",),
        Expert(1, 2): (own[0],),
        Expert(1, 3): (own[1],),
    }
    assert whole.experts == {"1": [], "2": [2, 3], "5": []}
    layers = whole.layers(dict.fromkeys(["0.weight", "2.deepspeed_moe.gate.wg.weight", *own], 8))
    assert [(layer.name, layer.experts, layer.expert_bytes) for layer in layers] == [
        ("1", 6, 1),
        ("2", 4, 8),
        ("5", 2, 1),
    ]
    with pytest.raises(KeyError):
        found.among({"1": 6})


@pytest.mark.parametrize(("last", "problem"), [(3, None), (5, "so many shared equally would be")])
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
