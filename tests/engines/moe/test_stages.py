"""The layers of all stages of a pipeline, put together on every rank."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.engines.moe.deepspeed import StageLayer, by_stage, layers_of_stages
from cpsr.errors import UnsupportedEngineError

LAYER = StageLayer(experts=4, expert_parallel=2, capacity_factor=1.0, drops_tokens=True)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(1, 3), st.randoms())
def test_stages_follow_each_other_whatever_the_order_of_ranks(counts: list[int], ranks: int, random: object) -> None:
    names = [[f"{stage}.{place}" for place in range(count)] for stage, count in enumerate(counts)]
    parts = [(stage, dict.fromkeys(names[stage], LAYER)) for stage in range(len(counts)) for _ in range(ranks)]
    random.shuffle(parts)  # type: ignore[attr-defined] # hypothesis types it as an object
    assert [list(layers) for layers in by_stage(parts)] == names


def test_a_layer_of_two_stages_is_refused() -> None:
    with pytest.raises(UnsupportedEngineError, match=r"'tied\.moe' is on stages 0 and 1"):
        by_stage([(0, {"0.moe": LAYER, "tied.moe": LAYER}), (1, {"tied.moe": LAYER})])


@pytest.mark.parametrize("other", [{}, {"1.moe": LAYER}, {"0.moe": replace(LAYER, experts=8)}])
def test_ranks_of_a_stage_have_the_same_layers(other: dict[str, StageLayer]) -> None:
    with pytest.raises(UnsupportedEngineError, match="ranks of stage 0 have different MoE layers"):
        by_stage([(0, {"0.moe": LAYER}), (0, other), (1, {})])


def test_a_process_alone_has_all() -> None:
    assert layers_of_stages(0, {"0.moe": LAYER}) == [{"0.moe": LAYER}]
