"""Planned copies on the host: every byte, once, and the hash of what lies in the buffer afterwards."""

import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsr.checkpoint import host_copy
from cpsr.checkpoint.buffers import HostBuffer, plan_spans
from cpsr.checkpoint.host_copy import HostCopyPlan
from cpsr.checkpoint.parts import REST
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
    plan = planned(buffer, shard)
    for change in (0.0, 1.0):  # a plan is used again
        for _, tensor in shard.tensors():
            tensor += change
        hashed = plan.run_hashed({REST})
        assert_same(buffer.shard_at(3), shard)
        expected = xxhash.xxh3_128(buffer.content.numpy().tobytes()).digest()
        assert hashed == ({0: expected} if sum(sizes) else {})
    for _, tensor in shard.tensors():
        tensor.zero_()
    plan.run({REST})
    assert_same(buffer.shard_at(3), shard)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 500, LARGE, 3 * LARGE + 5]), min_size=1, max_size=6),
    flat=st.booleans(),
    data=st.data(),
)
def test_parts_that_are_left_out_stay_as_they_are(sizes: list[int], flat: bool, data: st.DataObject) -> None:
    shard = shard_of(sizes, torch.float32, flat=flat)
    units = {name: data.draw(st.sampled_from([REST, "a", "b"])) for name in shard.operators}
    buffer = HostBuffer(shard, pinned=False, units=units)
    plan, parts = planned(buffer, shard), buffer.held.parts
    plan.run(parts.names)
    before = shard_of(sizes, torch.float32, flat=flat)
    for _, tensor in shard.tensors():
        tensor += 1
    chosen = data.draw(st.sets(st.sampled_from(sorted(parts.names))))
    hashed = plan.run_hashed(chosen)
    for name, found in buffer.shard_at(3).operators.items():
        wanted = shard if units[name] in chosen else before
        assert torch.equal(found.parameter.values, wanted.operators[name].parameter.values)
        assert torch.equal(found.moments["exp_avg"], wanted.operators[name].moments["exp_avg"])
    content = buffer.content.numpy()
    for place, segment in enumerate(parts.segments):
        digest = xxhash.xxh3_128_digest(content[segment.begin : segment.end].tobytes())
        assert hashed.get(place, digest) == digest
        assert (place in hashed) == (segment.part in chosen)


def planned(buffer: HostBuffer, shard: Shard) -> HostCopyPlan:
    return HostCopyPlan(plan_spans(buffer, shard), buffer.content, buffer.held.parts.segments)


def test_small_tensors_take_one_call() -> None:
    shard = shard_of([10] * 300, torch.float32, flat=False)
    buffer = HostBuffer(shard, pinned=False)
    plan = planned(buffer, shard)
    assert plan.calls <= 2
    plan.run({REST})
    assert_same(buffer.shard_at(3), shard)
