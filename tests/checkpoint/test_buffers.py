"""The plan of copies into a host buffer, in pieces."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from cpsr.checkpoint.buffers import Span, cut
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
