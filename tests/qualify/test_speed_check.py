"""What the stall of a snapshot is compared with."""

import torch

from cpsr.qualify.speed_check import copy_out
from tests.stand_in_device import stand_in_device


def test_the_copy_waits_once_and_not_for_each_tensor() -> None:
    with stand_in_device() as device:
        device.at_once = False
        shard = [device.tensor(torch.full((4,), float(index))) for index in range(3)]
        hosts = [torch.empty(4, pin_memory=True) for _ in shard]
        copy_out(shard, hosts)
        assert device.calls("synchronize") == []
        device.complete()
        assert [host.tolist() for host in hosts] == [[float(index)] * 4 for index in range(3)]
