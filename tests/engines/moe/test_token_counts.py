"""Token counts of layers of experts in plain torch; `tests/engines/mixture_cases.py` has those of several ranks."""

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cpsr.engines.moe.token_counts import Counted, HookedTokenCounts, RoutingLayer
from cpsr.errors import UnsupportedEngineError

EXPERTS = (3, 2)


class Layer(nn.Module):
    """Sends token t to expert t modulo the number of experts, and keeps how many it sent to each."""

    counts: torch.Tensor

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(experts))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(len(tokens)) % len(self.experts)
        self.counts = torch.bincount(places, minlength=len(self.experts))
        return torch.stack([self.experts[int(place)](token) for place, token in zip(places, tokens, strict=True)])


class Model(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(experts) for experts in EXPERTS)
        self.reentrant = reentrant
        self.leave_out: set[int] = set()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            if place in self.leave_out:
                continue
            if self.reentrant is None:
                tokens = layer(tokens)
            else:
                tokens = checkpoint(layer, tokens, use_reentrant=self.reentrant)
        return tokens.sum()


def counts_of(layer: nn.Module) -> torch.Tensor:
    assert isinstance(layer, Layer)
    return layer.counts


def counting(model: Model) -> HookedTokenCounts:
    layers = [
        RoutingLayer(f"layers.{place}", layer, experts)
        for place, (layer, experts) in enumerate(zip(model.layers, EXPERTS, strict=True))
    ]
    return HookedTokenCounts(layers, counts_of)


def train(model: Model, counts: HookedTokenCounts, iteration: int, *sizes: int, applied: bool = True) -> None:
    """One iteration of a micro-batch for each size, in tokens."""
    for size in sizes:
        counts.begin_forward()
        model(torch.ones(size, 2, requires_grad=True)).backward()
    counts.end_iteration(iteration, applied)


def as_lists(taken: list[Counted]) -> list[tuple[int, list[list[int]]]]:
    return [(one.iteration, [numpy.asarray(layer).tolist() for layer in one.tokens]) for one in taken]


def test_iterations_are_given_once() -> None:
    model = Model()
    counts = hooked = counting(model)
    assert counts.layer_names == ("layers.0", "layers.1")
    train(model, hooked, 1, 5)
    train(model, hooked, 2, 3, 1)
    taken = counts.take()
    assert as_lists(taken) == [(1, [[2, 2, 1], [3, 2]]), (2, [[2, 1, 1], [3, 1]])]
    assert counts.take() == []
    train(model, hooked, 3, 1)
    assert as_lists(counts.take()) == [(3, [[1, 0, 0], [1, 0]])]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_forward_that_a_backward_repeats_counts_once(reentrant: bool) -> None:
    model = Model(reentrant)
    counts = counting(model)
    train(model, counts, 1, 5, 1)
    assert as_lists(counts.take()) == [(1, [[3, 2, 1], [4, 2]])]


def test_what_is_not_trained_on_is_not_counted() -> None:
    model = Model()
    counts = counting(model)
    model(torch.ones(4, 2))  # before any step: nothing shows that it is training
    counts.begin_forward()
    model(torch.ones(2, 2)).backward()
    model.eval()
    model(torch.ones(4, 2))
    model.train()
    counts.end_iteration(1, applied=True)
    model(torch.ones(4, 2)).backward()  # between two steps, as rehearsals are
    train(model, counts, 2, 4, applied=False)
    train(model, counts, 3, 1)
    assert as_lists(counts.take()) == [(1, [[1, 1, 0], [1, 1]]), (3, [[1, 0, 0], [1, 0]])]


def test_no_step_reads_what_was_counted() -> None:
    """Tensors of the meta device have no values: what would make the host wait for a device fails on them."""
    model = Model()
    layers = [RoutingLayer("moe", model.layers[0], EXPERTS[0])]
    counts = HookedTokenCounts(layers, lambda _: torch.empty(EXPERTS[0], dtype=torch.int32, device="meta"))
    for iteration in range(1, 4):
        train(model, counts, iteration, 2, 3)
    with pytest.raises(NotImplementedError, match="meta"):
        counts.take()


def test_counts_of_other_experts_are_refused() -> None:
    model = Model()
    counts = HookedTokenCounts([RoutingLayer("moe", model.layers[0], 4)], counts_of)
    counts.begin_forward()
    with pytest.raises(UnsupportedEngineError, match=r"layer 'moe' reported the tokens of \(3,\) experts and has 4"):
        model(torch.ones(4, 2))


def test_in_a_pipeline_forwards_count_by_themselves_and_other_stages_have_a_place() -> None:
    """Nobody says when a forward begins; evaluations do not count. What another stage routes comes from there."""
    model = Model()
    layers = [
        RoutingLayer("0", None, 5),
        *(RoutingLayer(f"{place + 1}", one, EXPERTS[place]) for place, one in enumerate(model.layers)),
    ]
    counts = HookedTokenCounts(layers, counts_of, forwards_are_told=False)
    model(torch.ones(6, 2))
    model.eval()
    model(torch.ones(6, 2))
    model.train()
    counts.end_iteration(1, True)
    taken = counts.take()
    model(torch.ones(3, 2))
    counts.forget()
    model(torch.ones(4, 2))
    counts.end_iteration(2, True)
    taken += counts.take()
    found = [[list(map(int, numpy.asarray(layer))) for layer in one.tokens] for one in taken]
    assert found == [[[0] * 5, [2, 2, 2], [3, 3]], [[0] * 5, [2, 1, 1], [2, 2]]]
