"""How a shard lies in a host buffer, and the plan of copies into it, in pieces."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpsr.checkpoint.buffers import HostBuffer, Span, cut, layout_bytes
from cpsr.checkpoint.direct_file import BLOCK_BYTES
from cpsr.checkpoint.tensor_image import image_of
from cpsr.state.shard import OperatorState, ParamSlice, Shard
from tests.checkpoint.conftest import live_shard
from tests.device import DEVICE


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.sampled_from([torch.float32, torch.float16, torch.int64]))),
    st.integers(1, 4000),
)
def test_pieces_are_the_spans_and_no_larger_than_asked(sizes: list[tuple[int, torch.dtype]], piece_bytes: int) -> None:
    spans, offset = [], 64
    for size, dtype in sizes:
        spans.append(Span(offset, torch.arange(size).to(dtype).to(DEVICE)))
        offset = spans[-1].end + 64
    pieces = cut(spans, piece_bytes)
    filled = torch.zeros(offset, dtype=torch.uint8)
    expected = filled.clone()
    for span in spans:
        expected[span.offset : span.end] = span.source.view(torch.uint8).cpu()
    for piece in pieces:
        assert piece.source.nbytes <= max(piece_bytes, piece.source.element_size())
        assert not filled[piece.offset : piece.end].any()
        filled[piece.offset : piece.end] = piece.source.view(torch.uint8).cpu()
    assert torch.equal(filled, expected)


def test_what_is_not_contiguous_stays_in_one() -> None:
    span = Span(0, torch.arange(100)[::2])
    assert cut([span], 16) == [span]


def mixed_shard() -> Shard:
    """Operators of several dtypes and sizes that are no multiple of anything, each in a storage of its own."""
    operators = {}
    for number, dtype in enumerate([torch.bfloat16, torch.float32, torch.int8, torch.float64, torch.float32]):
        values, moment = (torch.ones(7 * number + 3, device=DEVICE).to(dtype) for _ in range(2))
        name = f"layers.{number}"
        operators[name] = OperatorState(name, ParamSlice(values, (values.numel(),)), {"m": moment.float()}, 0)
    return Shard(operators, {"flag": torch.tensor(True, device=DEVICE), "count": torch.tensor(3, device=DEVICE)})


@pytest.mark.parametrize("shard", [live_shard(), mixed_shard()], ids=["flat", "mixed"])
def test_each_kind_lies_as_in_its_file_from_the_start_of_a_block(shard: Shard) -> None:
    buffer = HostBuffer(shard, pinned=False)
    views = dict(buffer.shard_at(0).tensors())
    for kind in ("param/", "moment/", "other/"):
        ones = {key: views[key] for key in sorted(views, key=buffer.offsets.__getitem__) if key.startswith(kind)}
        _, run = image_of(ones)
        assert run.ctypes.data % BLOCK_BYTES == 0
        assert run.nbytes == sum(view.nbytes for view in ones.values())
    assert layout_bytes(shard) % BLOCK_BYTES == 0


def test_ranks_with_equal_tensors_have_equal_layouts_wherever_these_lie() -> None:
    shard = mixed_shard()
    operators = {
        name: replace(one, parameter=replace(one.parameter, values=one.parameter.values.clone()))
        for name, one in reversed(shard.operators.items())
    }
    moved = Shard({name: operators[name] for name in shard.operators}, shard.others)
    assert HostBuffer(moved, pinned=False).offsets == HostBuffer(shard, pinned=False).offsets
    assert layout_bytes(moved) == layout_bytes(shard)
