"""The bytes of a safetensors file, as its own library reads them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from cpsr.checkpoint.tensor_file import HEADER_BYTES_MAX, image_of
from cpsr.errors import SaveError

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64),
]
SHAPES = st.lists(st.integers(0, 5), max_size=3)


def content(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    return b"".join(run.tobytes() for run in image_of(tensors, metadata))


def filled(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    size = torch.empty(shape, dtype=dtype).nbytes
    return torch.arange(size).remainder(2).to(torch.uint8).view(dtype).view(shape)


@given(st.dictionaries(st.text(max_size=8), st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=6))
def test_the_library_reads_every_dtype_shape_and_name(described: dict[str, tuple[list[int], torch.dtype]]) -> None:
    tensors = {key: filled(shape, dtype) for key, (shape, dtype) in described.items()}
    found = load(content(tensors))
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[key].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("tensor", [torch.ones(4, 4).t(), torch.ones(8)[::2]])
def test_what_is_not_contiguous_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(SaveError, match="a cannot be written: it is not contiguous"):
        image_of({"a": tensor})


def test_a_dtype_that_safetensors_lacks_is_refused() -> None:
    with pytest.raises(SaveError, match=r"cannot hold torch\.complex128"):
        image_of({"a": torch.ones(1, dtype=torch.complex128)})


def test_a_dtype_of_several_elements_to_a_byte_is_refused() -> None:
    with pytest.raises(SaveError, match="several elements to a byte"):
        image_of({"a": torch.empty(2, dtype=torch.float4_e2m1fn_x2)})


def test_more_tensors_than_the_library_reads_are_refused() -> None:
    with pytest.raises(SaveError, match="too many tensors for one file"):
        image_of({"a" * HEADER_BYTES_MAX: torch.ones(1)})
