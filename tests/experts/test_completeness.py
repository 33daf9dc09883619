"""Every expert is some rank's, whole."""

import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.experts.completeness import Held, missing_experts
from cpsr.experts.naming import DEEPSPEED, MODULE_LIST

SHAPE = (4, 3)


def whole(*names: str) -> dict[str, Held]:
    return dict.fromkeys(names, (SHAPE, 0, 12))


def weights(layer: str, *experts: int) -> list[str]:
    return [f"{layer}.experts.{expert}.weight" for expert in experts]


def test_experts_shared_out_whole() -> None:
    parts = {0: whole(*weights("a", 0, 1), "norm.weight"), 1: whole(*weights("a", 2, 3), *weights("b", 0))}
    assert missing_experts(parts, MODULE_LIST) is None


def test_replicas_and_slices() -> None:
    name = "a.experts.0.weight"
    parts: dict[int, dict[str, Held]] = {
        0: {name: (SHAPE, 0, 8)},
        1: {name: (SHAPE, 5, 7)},
        2: {name: (SHAPE, 0, 12)},
    }
    assert missing_experts(parts, MODULE_LIST) is None
    del parts[2]
    assert missing_experts(parts, MODULE_LIST) is None
    parts[1] = {name: (SHAPE, 9, 3)}
    assert missing_experts(parts, MODULE_LIST) == f"no rank has elements 8 to 8 of '{name}'"
    parts[1] = {name: (SHAPE, 7, 3)}
    assert missing_experts(parts, MODULE_LIST) == f"no rank has elements 10 to 11 of '{name}'"


def test_the_experts_of_a_rank_that_holds_none() -> None:
    parts = {0: whole(*weights("a", 0, 1)), 1: whole(*weights("a", 4, 5))}
    assert missing_experts(parts, MODULE_LIST) == "no rank has expert 2 of layer 'a', and 1 more"
    parts = {0: whole(*weights("a", 0, 1)), 1: whole("norm.weight")}
    assert missing_experts(parts, MODULE_LIST, {"a": range(4)}) == "no rank has expert 2 of layer 'a', and 1 more"
    assert missing_experts({0: {}, 1: {}}, MODULE_LIST, {"a": [0]}) == "no rank has expert 0 of layer 'a'"


def test_experts_that_nobody_trains_are_not_missed() -> None:
    parts = {0: whole(*weights("a", 1)), 1: whole(*weights("a", 3))}
    assert missing_experts(parts, MODULE_LIST, {"a": (1, 3)}) is None


def test_scalars_and_parameters_without_elements() -> None:
    parts: dict[int, dict[str, Held]] = {
        0: {"a.experts.0.scale": ((), 0, 1), "a.experts.0.none": ((0, 3), 0, 0), "a.experts.1.scale": ((), 0, 0)}
    }
    assert missing_experts(parts, MODULE_LIST) == "no rank has elements 0 to 0 of 'a.experts.1.scale'"


def test_other_names() -> None:
    inside = "moe.deepspeed_moe.experts.deepspeed_experts"
    parts = {0: whole(f"{inside}.0.up.weight", "moe.deepspeed_moe.gate.wg.weight"), 1: whole(f"{inside}.2.up.weight")}
    assert missing_experts(parts, DEEPSPEED) == "no rank has expert 1 of layer 'moe'"
    assert missing_experts({0: whole("norm.weight")}, MODULE_LIST) is None
    assert missing_experts({}, MODULE_LIST) is None


@given(st.data())
def test_any_element_that_is_left_out_is_missed(data: st.DataObject) -> None:
    total, name = math.prod(SHAPE), "a.experts.0.weight"
    cuts = sorted(data.draw(st.sets(st.integers(1, total - 1), max_size=4)))
    edges = list(zip([0, *cuts], [*cuts, total], strict=True))
    order = data.draw(st.permutations(edges))
    parts: Mapping[int, Mapping[str, Held]] = {
        rank: {name: (SHAPE, first, end - first)} for rank, (first, end) in enumerate(order)
    }
    assert missing_experts(parts, MODULE_LIST) is None
    gone = data.draw(st.integers(0, len(order) - 1))
    first, end = order[gone]
    told = missing_experts({rank: part for rank, part in parts.items() if rank != gone}, MODULE_LIST, {"a": [0]})
    if len(order) == 1:
        assert told == "no rank has expert 0 of layer 'a'"
    else:
        assert told == f"no rank has elements {first} to {end - 1} of '{name}'"


@pytest.mark.parametrize("layers", [1, 3])
def test_every_gap_is_counted(layers: int) -> None:
    parts = {0: whole(*(name for layer in range(layers) for name in weights(str(layer), 0, 3)))}
    told = missing_experts(parts, MODULE_LIST)
    assert told is not None
    assert told.endswith(f"and {2 * layers - 1} more")
