"""Shared memory is registered with CUDA once, and never longer than it is mapped."""

from collections.abc import Iterator

import pytest
import torch

from cpsr.checkpoint.device_copy import Pinning
from cpsr.checkpoint.memory import SharedMemory
from cpsr.checkpoint.memory_states import SHARED_MEMORY
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.errors import SaveError
from tests.checkpoint.test_device_copy import shard_on
from tests.stand_in_device import OUT_OF_MEMORY, StandInDevice, stand_in_device

CUDA = torch.device("cuda", 1)


@pytest.fixture
def device() -> Iterator[StandInDevice]:
    with stand_in_device(2) as made:
        yield made


def test_a_refusal_leaves_no_error_for_the_next_kernel(device: StandInDevice) -> None:
    device.runtime.refuse = OUT_OF_MEMORY
    with pytest.raises(SaveError, match=r"4096 bytes of shared memory could not be pinned \(CUDA error 2\)"):
        Pinning(torch.zeros(4096, dtype=torch.uint8), CUDA)
    device.tensor(torch.ones(3)).mul_(2)
    assert {stream for _, stream, _ in device.calls("launch")} == {"default:1", "default:0"}, "the error is the state's"


def test_a_registration_that_outlived_its_mapping_gives_way(device: StandInDevice) -> None:
    memory = torch.zeros(4096, dtype=torch.uint8)
    device.runtime.registered[memory.data_ptr()] = 8192  # of pages that were unmapped: not these
    Pinning(memory, CUDA)
    assert device.runtime.registered == {memory.data_ptr(): 4096}
    device.tensor(torch.ones(3)).mul_(2)


def test_each_pool_of_a_process_registers_its_own_and_lets_it_go(device: StandInDevice, run_id: str) -> None:
    shard = shard_on(device)
    for life in range(3):
        pool = SnapshotPool(shard, memory=SharedMemory(run_id, 0, life))
        assert pool.shared_memory_problem is None
        assert len(device.runtime.registered) == 3
        assert all(size > 0 for size in device.runtime.registered.values())
        pool.close(remove=False)
        assert device.runtime.registered == {}
    assert len(device.calls("register")) == len(device.calls("unregister")) == 9


def test_where_it_is_refused_the_buffers_are_pinned_memory_of_the_process(device: StandInDevice, run_id: str) -> None:
    shard = shard_on(device)
    device.runtime.refuse = OUT_OF_MEMORY
    pool = SnapshotPool(shard, memory=SharedMemory(run_id, 0, 0))
    assert pool.shared_memory_problem is not None
    assert "could not be pinned" in pool.shared_memory_problem
    assert list(SHARED_MEMORY.glob(f"cpsr-{run_id}*")) == [], "what holds nothing takes no memory"
    assert len(device.calls("pin")) == 3
    device.tensor(torch.ones(3)).mul_(2)
    assert pool.begin(shard, 7, {}) is not None
    assert pool.finish() is not None
    pool.close()
