"""Planned copies on the host: every byte, once, and the hash of what lies in the buffer afterwards."""

import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsr.checkpoint import host_copy
from cpsr.checkpoint.buffers import HostBuffer, plan_spans
from cpsr.checkpoint.host_copy import HostCopyPlan
from cpsr.state.shard import OperatorState, ParamSlice, Shard

LARGE = host_copy.SMALL_ELEMENTS


def assert_same(one: Shard, other: Shard) -> None:
    values = dict(other.tensors())
    for key, tensor in one.tensors():
        assert torch.equal(tensor, values.pop(key)), key
    assert not values


def shard_of(sizes: list[int], dtype: torch.dtype, *, flat: bool, step: int = 1) -> Shard:
    """Operators of these sizes, with one moment; in one flat tensor or each in its own; with gaps where step is 2."""
    generator = torch.Generator().manual_seed(len(sizes))
    whole = torch.randn(2, step * (sum(sizes) + 1), generator=generator)
    operators, start = {}, 0
    for index, size in enumerate(sizes):
        values, moment = (row[start : start + step * size : step] for row in whole)
        start += step * size
        if not flat:
            values, moment = values.clone(), moment.clone()
        name = f"layer.{index}"
        operators[name] = OperatorState(name, ParamSlice(values, (size,)), {"exp_avg": moment.to(dtype)}, 3)
    return Shard(operators)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(
        st.sampled_from([0, 1, 7, 500, LARGE - 1, LARGE, 3 * LARGE + 5, 20 * LARGE]), min_size=1, max_size=6
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    flat=st.booleans(),
    step=st.sampled_from([1, 2]),
)
def test_every_byte_is_copied_and_the_hash_is_of_what_lies_there(
    sizes: list[int], dtype: torch.dtype, flat: bool, step: int
) -> None:
    shard = shard_of(sizes, dtype, flat=flat, step=step)
    buffer = HostBuffer(shard, pinned=False)
    plan = HostCopyPlan(plan_spans(buffer, shard), buffer.content)
    for change in (0.0, 1.0):  # a plan is used again
        for _, tensor in shard.tensors():
            tensor += change
        hashed = plan.run_hashed()
        assert_same(buffer.shard_at(3), shard)
        assert hashed.digest() == xxhash.xxh3_128(buffer.content.numpy().tobytes()).digest()
    for _, tensor in shard.tensors():
        tensor.zero_()
    plan.run()
    assert_same(buffer.shard_at(3), shard)


def test_small_tensors_take_one_call() -> None:
    shard = shard_of([10] * 300, torch.float32, flat=False)
    buffer = HostBuffer(shard, pinned=False)
    plan = HostCopyPlan(plan_spans(buffer, shard), buffer.content)
    assert plan.calls <= 2
    plan.run()
    assert_same(buffer.shard_at(3), shard)
