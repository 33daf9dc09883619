"""Every expert is some rank's, whole."""

import math
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from cpsr.engines.moe.operators import MODULE_LIST
from cpsr.experts.completeness import SavedSlice, wrong_experts

SHAPE = (4, 3)


def whole(*names: str) -> dict[str, SavedSlice]:
    return dict.fromkeys(names, (SHAPE, 0, 12))


def weights(layer: str, *experts: int) -> list[str]:
    return [f"{layer}.experts.{expert}.weight" for expert in experts]


def test_experts_shared_out_whole() -> None:
    parts = {0: whole(*weights("a", 0, 1), "norm.weight"), 1: whole(*weights("a", 2, 3), *weights("b", 0))}
    assert wrong_experts(parts, {}, MODULE_LIST) is None


def test_replicas_and_slices() -> None:
    name = "a.experts.0.weight"
    parts: dict[int, dict[str, SavedSlice]] = {
        0: {name: (SHAPE, 0, 8)},
        1: {name: (SHAPE, 5, 7)},
        2: {name: (SHAPE, 0, 12)},
    }
    assert wrong_experts(parts, {}, MODULE_LIST) is None
    del parts[2]
    assert wrong_experts(parts, {}, MODULE_LIST) is None
    parts[1] = {name: (SHAPE, 9, 3)}
    assert wrong_experts(parts, {}, MODULE_LIST) == f"no rank has elements 8 to 8 of '{name}'"
    parts[1] = {name: (SHAPE, 7, 3)}
    assert wrong_experts(parts, {}, MODULE_LIST) == f"no rank has elements 10 to 11 of '{name}'"


def test_the_experts_of_a_rank_that_holds_none() -> None:
    parts = {0: whole(*weights("a", 0, 1)), 1: whole(*weights("a", 4, 5))}
    assert wrong_experts(parts, {}, MODULE_LIST) == "no rank has expert 2 of layer 'a', and 1 more"
    parts = {0: whole(*weights("a", 0, 1)), 1: whole("norm.weight")}
    message = wrong_experts(parts, {}, MODULE_LIST, weights("a", *range(4)))
    assert message == "no rank has expert 2 of layer 'a', and 1 more"
    assert wrong_experts({0: {}, 1: {}}, {}, MODULE_LIST, weights("a", 0)) == "no rank has expert 0 of layer 'a'"


def test_a_parameter_that_no_rank_has_of_an_expert_that_some_have() -> None:
    trained = [*weights("a", 0, 1), "a.experts.0.bias", "a.experts.1.bias"]
    parts = {0: whole(*weights("a", 0), "a.experts.0.bias"), 1: whole(*weights("a", 1)), 2: whole(*weights("a", 1))}
    message = wrong_experts(parts, {}, MODULE_LIST, trained)
    assert message == "no rank has 'a.experts.1.bias' (expert 1 of layer 'a')"
    assert wrong_experts({**parts, 2: whole("a.experts.1.bias")}, {}, MODULE_LIST, trained) is None
    message = wrong_experts({0: parts[0]}, {}, MODULE_LIST, trained)
    assert message == "no rank has expert 1 of layer 'a'", "its parameters are not counted one by one"


def test_replicas_of_different_shapes() -> None:
    name = "a.experts.3.weight"
    parts: dict[int, dict[str, SavedSlice]] = {0: {}, 1: {name: (SHAPE, 0, 12)}, 2: {name: ((3, 4), 0, 12)}}
    message = wrong_experts(parts, {}, MODULE_LIST)
    assert message is not None
    assert message.startswith(f"'{name}' (expert 3 of layer 'a') is (3, 4) on rank 2 and (4, 3) on rank 1: ")
    assert "number over all ranks" in message
    assert wrong_experts(parts, {}, MODULE_LIST, [name]) == message
    assert wrong_experts(parts, {}, MODULE_LIST, []) is None, "a buffer may be of any size on each rank"
    assert (
        wrong_experts({1: {"norm.weight": (SHAPE, 0, 12)}, 2: {"norm.weight": ((2,), 0, 2)}}, {}, MODULE_LIST) is None
    )


def test_scalars_and_parameters_without_elements() -> None:
    parts: dict[int, dict[str, SavedSlice]] = {
        0: {"a.experts.0.scale": ((), 0, 1), "a.experts.0.none": ((0, 3), 0, 0), "a.experts.1.scale": ((), 0, 0)}
    }
    assert wrong_experts(parts, {}, MODULE_LIST) == "no rank has elements 0 to 0 of 'a.experts.1.scale'"


@given(st.data())
def test_any_element_that_is_left_out_is_missed(data: st.DataObject) -> None:
    total, name = math.prod(SHAPE), "a.experts.0.weight"
    cuts = sorted(data.draw(st.sets(st.integers(1, total - 1), max_size=4)))
    edges = list(zip([0, *cuts], [*cuts, total], strict=True))
    order = data.draw(st.permutations(edges))
    parts: Mapping[int, Mapping[str, SavedSlice]] = {
        rank: {name: (SHAPE, first, end - first)} for rank, (first, end) in enumerate(order)
    }
    assert wrong_experts(parts, {}, MODULE_LIST) is None
    gone = data.draw(st.integers(0, len(order) - 1))
    first, end = order[gone]
    message = wrong_experts({rank: part for rank, part in parts.items() if rank != gone}, {}, MODULE_LIST, [name])
    if len(order) == 1:
        assert message == "no rank has expert 0 of layer 'a'"
    else:
        assert message == f"no rank has elements {first} to {end - 1} of '{name}'"
