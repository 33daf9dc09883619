"""The rule of conformance itself, where the state lies on a GPU."""

import torch

from cpsr.qualify.conformance import inject, take_snapshot
from tests.engines.torch_cases import build
from tests.stand_in_device import stand_in_device

CUDA = torch.device("cuda", 1)


def test_a_snapshot_has_the_random_state_of_the_gpu() -> None:
    adapter = build("fp32", "sgd", "none").adapter
    adapter.device = CUDA  # the tensors stay on the host: no GPU is needed
    with stand_in_device(2) as device:
        before = device.random_states[1].clone()
        snapshot = take_snapshot(adapter)
        device.random_states[1] += 1
        inject(adapter, snapshot)
        assert torch.equal(device.random_states[1], before)
        assert [about for _, _, about in device.calls("set_rng_state")] == ["cuda:1"]
