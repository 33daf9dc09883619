"""Sampled weights: always the same elements, where the weights lie now, and on a GPU without waiting."""

import struct
from itertools import pairwise
from typing import Any

import pytest
import torch

from cpsr import TorchAdapter
from cpsr.engines.weight_sample import WeightSample
from cpsr.state.shard import OperatorState, ParamSlice, Shard
from tests.stand_in_device import stand_in_device


def training(*sizes: int, dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, TorchAdapter]:
    torch.manual_seed(0)
    layers = (torch.nn.Linear(before, after) for before, after in pairwise(sizes))
    model = torch.nn.Sequential(*layers).to(dtype)
    return model, TorchAdapter(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_elements_are_the_weights(dtype: torch.dtype) -> None:
    model, adapter = training(20, 20, dtype=dtype)
    sample = WeightSample(adapter, adapter.shard())
    found, weights = sample.read().numbers(), dict(model.named_parameters())
    for index, number in enumerate(found):
        name, place = sample.name(index).removesuffix("]").split("[")
        assert number == weights[name].detach().flatten()[int(place)].item()
    with torch.no_grad():
        weights["0.weight"].add_(1)
    assert (sample.read().numbers() != found).any()


def test_weights_that_get_other_memory_are_found() -> None:
    model, adapter = training(20, 20)
    sample = WeightSample(adapter, adapter.shard())
    for value in (3.0, 4.0):
        for one in model.parameters():
            one.data = torch.full_like(one, value)
        assert (sample.read().numbers() == value).all()


class OnDevice:
    """An engine whose weights lie on a stand-in for a GPU."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.optimizers: list[Any] = [type("Optimizer", (), {"param_groups": [{"params": tensors}]})()]

    def shard(self) -> Shard:
        named = enumerate(self.optimizers[0].param_groups[0]["params"])
        return Shard({str(at): OperatorState(str(at), ParamSlice(one, tuple(one.shape)), {}, 0) for at, one in named})


def test_a_device_is_not_waited_for() -> None:
    with stand_in_device() as device:
        engine: Any = OnDevice([device.tensor(torch.arange(40.0)), device.tensor(torch.arange(7.0).bfloat16())])
        sample = WeightSample(engine, engine.shard())
        device.at_once = False
        device.trace.clear()
        sent = sample.send(device.tensor(torch.tensor(0.5)))
        assert not [call for call in device.trace if call[0] == "synchronize"]
        assert not sent.arrival.here
        device.complete()
        assert sent.arrival.here
        found, loss = sent.read()
        assert loss == 0.5
        assert found.counts == (0, 40, 7, 0)
        assert struct.unpack("<40f", found.content[:160])[3] in range(40)
        assert sorted(found.numbers()[:40]) == list(range(40))
        assert sample.send(None).has_loss is False
