"""Tokens that failures take from experts, and experts that make up for them."""

import json
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.experts.account import ExpertAccount, Loss
from cpsr.experts.policies import Budget, Sequential
from tests.engines.moe.mixtures import mixture, no_load
from tests.experts.ledger import Ledger

LAYERS = mixture(2, 3)


class Capacities:
    """A mixture whose layers have limits; they are 1 at first."""

    def __init__(self) -> None:
        self.factors: dict[str, float] = {}

    def scale_capacity(self, layer: str, factor: float) -> bool:
        self.factors[layer] = factor
        return True


def account_of(layers: Any = LAYERS, fraction: float = 0.1) -> tuple[ExpertAccount, dict[str, float]]:
    capacities: Any = Capacities()
    return ExpertAccount(capacities, layers, fraction), capacities.factors


def loss(lost: list[list[float]], assigned: list[float]) -> Loss:
    routed = [numpy.full(len(layer), whole / len(layer)) for layer, whole in zip(lost, assigned, strict=True)]
    return Loss(tuple(map(numpy.array, lost)), tuple(routed))


def reported(account: ExpertAccount, last: Loss) -> dict[str, Any]:
    return account.report(last, tuple(numpy.zeros(len(layer), dtype=int) for layer in last.lost), 1)


def test_two_failures_by_hand() -> None:
    account, _ = account_of()
    account.restored(loss([[5, 0], [1, 1, 1]], [50, 100]))
    last = loss([[0, 5], [0, 0, 1]], [100, 200])
    account.restored(last)
    found = reported(account, last)
    assert [layer["lost_fraction_of_run"] for layer in found["layers"]] == [0.1, 0.02]
    assert found["lost_portion_of_run"] == pytest.approx(14 / 300)
    assert found["lost_portion"] == pytest.approx(6 / 300)
    assert found["momentary_loss_of_run"] == {"total": pytest.approx(0.12), "mean": pytest.approx(0.06)}
    with pytest.raises(ValueError, match="not of the whole run"):
        reported(account, loss([[0, 0], [0, 0, 0]], [1, 200]))


@given(
    st.integers(1, 8),
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.lists(st.integers(0, 50), min_size=8, max_size=8),
)
def test_failures_of_a_run_that_saves_in_turn(count: int, gaps: list[int], tokens: list[int]) -> None:
    """Going back to the last snapshot, an expert loses what came between its own snapshot and that one."""
    layers = mixture(8)
    ledger, policy, (account, _) = Ledger(layers), Sequential(layers), account_of(layers)
    step, expected = 0, 0.0
    for gap in gaps:
        last_saved = dict.fromkeys(range(8), step)
        for _ in range(gap):
            step += 1
            ledger.observe([tokens])
            chosen = policy.select(step, no_load(layers), Budget(experts_per_layer=count))
            ledger.saved(chosen)
            last_saved |= {expert.index: step for expert in chosen}
        last = loss([ledger.tokens[0].tolist()], [step * sum(tokens)])
        account.restored(last)
        ledger.tokens[0][:] = 0  # every expert is what its snapshot holds
        expected += sum((step - at) * tokens[index] for index, at in last_saved.items())
    assigned = step * sum(tokens)
    portion = reported(account, last)["lost_portion_of_run"]
    assert portion == pytest.approx(expected / assigned if assigned else 0)
    if count == 8:
        assert expected == 0


def test_a_layer_has_more_capacity_until_the_fraction_of_its_tokens_is_what_it_lost() -> None:
    account, factors = account_of(mixture(2, 1))
    account.restored(loss([[0, 10], [3]], [100, 100]))
    assert factors == {"blocks.0": 1.1, "blocks.1": 1.1}
    account.observe([[500, 50], [30]])
    account.set_capacities()
    assert factors == {"blocks.0": 1.1, "blocks.1": 1.0}
    account.restored(loss([[0, 1], [0]], [200, 200]))
    for routed, factor in (([0, 59], 1.1), ([0, 2], 1.0)):
        account.observe([routed, [0]])
        account.set_capacities()
        assert factors["blocks.0"] == factor


def test_a_checkpoint_brings_it_back() -> None:
    account, _ = account_of()
    account.restored(loss([[5, 0], [0, 0, 1]], [50, 100]))
    saved = json.loads(json.dumps(account.state_dict()))
    back, factors = account_of()
    back.load_state_dict(saved)
    assert back.state_dict() == saved
    assert factors == {"blocks.0": 1.1, "blocks.1": 1.1}
    with pytest.raises(ValueError, match="lost tokens"):
        back.load_state_dict(account_of(mixture(2, 2))[0].state_dict())
    assert back.state_dict() == saved
    back.close()
    without, factors = account_of(fraction=0)
    without.load_state_dict(saved)
    assert factors == {}
