"""Experts that make up for lost tokens."""

import numpy
import pytest

from cpsr.experts.recovering import Recovering
from tests.engines.moe.mixtures import mixture

LAYERS = mixture(2, 1)


def test_an_expert_recovers_until_the_fraction_of_its_tokens_is_what_it_lost() -> None:
    recovering = Recovering(LAYERS, fraction=0.1)
    assert recovering.in_layers == (False, False)
    recovering.lost([[0, 10], [3]])
    assert recovering.in_layers == (True, True)
    recovering.observe([[500, 50], [30]])
    assert [layer.tolist() for layer in recovering.missing] == [[0, 5], [0]]
    assert recovering.in_layers == (True, False)
    recovering.lost([[0, 1], [0]])
    recovering.observe([[0, 59], [0]])
    assert recovering.in_layers == (True, False)
    recovering.observe([[0, 2], [0]])
    assert recovering.in_layers == (False, False)


def test_an_expert_to_which_nothing_is_routed_goes_on_recovering() -> None:
    recovering = Recovering(LAYERS)
    recovering.lost([[0, 10], [0]])
    recovering.observe([[1000, 0], [1000]])
    assert recovering.in_layers == (True, False)


def test_without_more_capacity_nothing_recovers() -> None:
    recovering = Recovering(LAYERS, fraction=0)
    recovering.lost([[1, 10], [3]])
    recovering.load_state_dict([[1.0, 10.0], [3.0]])
    assert recovering.in_layers == (False, False)


def test_a_checkpoint_brings_it_back() -> None:
    recovering, back = Recovering(LAYERS), Recovering(LAYERS)
    recovering.lost([[0, 10], [3]])
    back.load_state_dict(recovering.state_dict())
    assert numpy.array_equal(back.missing[0], recovering.missing[0])
    with pytest.raises(ValueError, match="tokens to make up"):
        back.load_state_dict([[1.0], [1.0]])
    assert back.in_layers == (True, True)


def test_capacity_is_raised_by_the_papers_tenth_unless_it_is_set_otherwise() -> None:
    recovering = Recovering(LAYERS)
    recovering.lost([[0, 10], [3]])
    recovering.observe([[0, 50], [10]])
    assert [layer.tolist() for layer in recovering.missing] == [[0, 5], [2]]
