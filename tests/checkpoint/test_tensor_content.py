"""The tensors of a file that is read once: whole, in any pieces, and refused where it is none."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from cpsr.checkpoint.tensor_content import TensorContent
from cpsr.checkpoint.tensor_image import dtype_of, image_of

TENSORS = {
    "weights": torch.arange(7.0).reshape(7, 1),
    "half": torch.arange(5, dtype=torch.bfloat16),
    "none": torch.empty(0, 3),
    "step": torch.tensor(12),
    "mask": torch.tensor([True, False, True]),
}


def taken(data: bytes, pieces: int, wanted: frozenset[str] = frozenset(TENSORS)) -> dict[str, torch.Tensor]:
    def place(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        return torch.full(shape, 1, dtype=dtype) if name in wanted else None

    content = TensorContent(len(data), place)
    for start in range(0, len(data), pieces):
        content.take(memoryview(data)[start : start + pieces])
    return content.tensors()


def altered(described: object, data: bytes = b"") -> bytes:
    text = json.dumps(described).encode()
    return len(text).to_bytes(8, "little") + text + data


@given(pieces=st.integers(1, 9000), aligned=st.booleans(), wanted=st.frozensets(st.sampled_from(sorted(TENSORS))))
@settings(max_examples=60, deadline=None)
def test_wanted_tensors_come_whole_in_pieces_of_any_size(pieces: int, aligned: bool, wanted: frozenset[str]) -> None:
    data = b"".join(run.tobytes() for run in image_of(TENSORS, {"by": "us"})) if aligned else save(TENSORS)
    found = taken(data, pieces, wanted)
    assert found.keys() == wanted
    assert all(found[name].dtype == TENSORS[name].dtype for name in wanted)
    assert all(torch.equal(found[name], TENSORS[name]) for name in wanted)


@given(data=st.binary(max_size=60), edits=st.lists(st.tuples(st.integers(0, 10**4), st.integers(0, 255)), max_size=4))
@settings(max_examples=200, deadline=None)
def test_whatever_the_bytes_are_nothing_else_is_raised(data: bytes, edits: list[tuple[int, int]]) -> None:
    content = bytearray(save(TENSORS) + data)
    for place, value in edits:
        content[place % len(content)] = value
    try:
        found = taken(bytes(content), 64)
    except ValueError:
        return
    assert all(tensor.nbytes <= len(content) for tensor in found.values())


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "ends at byte 0"),
        (save(TENSORS)[:5], "ends at byte 5"),
        (save(TENSORS)[:-1], "lies at"),
        ((10**12).to_bytes(8, "little"), "header would end"),
        (altered([1]), "list indices|pop"),
        (altered({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(8)), "lies at 0 to 4"),
        (altered({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)), "no dtype 'F99'"),
        (altered({"a": {"dtype": "U8", "shape": [-1], "data_offsets": [0, -1]}}, bytes(4)), "lies at"),
        (
            altered(
                {
                    name: {"dtype": "U8", "shape": [4], "data_offsets": [at, at + 4]}
                    for name, at in (("a", 0), ("b", 2))
                },
                bytes(8),
            ),
            "lies at 2 to 6",
        ),
    ],
)
def test_what_is_no_file_of_tensors_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        taken(data, 16)


def test_what_follows_a_refusal_is_taken_and_copied_nowhere() -> None:
    tensors = {name: torch.ones(4) for name in "abcd"}

    def place(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        if name == "d":
            raise ValueError("nobody knows d")
        return torch.zeros(shape, dtype=dtype)

    data = b"".join(run.tobytes() for run in image_of(tensors))
    content = TensorContent(len(data), place)
    for start in range(0, len(data), 32):
        content.take(memoryview(data)[start : start + 32])
    with pytest.raises(ValueError, match="nobody knows d"):
        content.tensors()


def test_dtypes_have_the_library_s_names(tmp_path: Path) -> None:
    assert (dtype_of("F32"), dtype_of("BF16"), dtype_of("BOOL")) == (torch.float32, torch.bfloat16, torch.bool)
    for name in ("F4", "nothing"):
        with pytest.raises(ValueError, match=f"no dtype '{name}'"):
            dtype_of(name)
