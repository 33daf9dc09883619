"""The bytes of a safetensors file, as runs of the memory in which its tensors lie."""

import json
from collections.abc import Mapping
from functools import cache

import numpy
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save

from cpsr.checkpoint.direct_file import BLOCK_BYTES
from cpsr.errors import SaveError

__all__ = ["HEADER_BYTES_MAX", "LENGTH_BYTES", "METADATA", "bytes_of", "dtype_of", "image_of", "in_file_order"]
__all__ += ["in_memory_order"]

LENGTH_BYTES = 8  # a safetensors file starts with its header's length, little-endian
HEADER_BYTES_MAX = 100_000_000  # the library reads no longer one
METADATA = "__metadata__"


def image_of(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> list[NDArray[numpy.uint8]]:
    """The content of a safetensors file: the header, filled up to whole blocks, then the tensors.

    Args:
        tensors: contiguous and on the CPU; in the file they are `in_file_order`.
        metadata: of the file.

    Returns:
        Views of the tensors' memory, one for each run of tensors that follow each other there, after the header.

    Raises:
        SaveError: a tensor is not contiguous on the CPU, or safetensors cannot hold its dtype or name; or there are
            too many.
    """
    ordered = in_file_order(tensors)
    return [numpy.frombuffer(_header(ordered, metadata), numpy.uint8), *_runs(ordered)]


def in_file_order(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors by descending size of their elements, else in their own order, so that each is aligned to its own."""
    return dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))


def in_memory_order(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of each storage as they follow each other there, the storages in the order of the tensors.

    Not by address: ranks with equal tensors write equal files.
    """
    storages: dict[int, int] = {}
    places = {}
    for key, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        places[key] = storages.setdefault(storage, len(storages)), tensor.data_ptr() - storage
    return {key: tensors[key] for key in sorted(places, key=places.__getitem__)}


def bytes_of(tensor: torch.Tensor) -> NDArray[numpy.uint8]:
    """The memory of a tensor that is contiguous on the CPU, `(nbytes,)`."""
    storage = tensor.untyped_storage()
    start = tensor.data_ptr() - storage.data_ptr()
    return _bytes(storage, start, start + tensor.nbytes)


@cache
def dtype_of(name: str) -> torch.dtype:
    """The dtype that the library calls so.

    Raises:
        ValueError: there is none.
    """
    text = json.dumps({"": {"dtype": name, "shape": [0], "data_offsets": [0, 0]}}).encode()
    try:
        dtype: torch.dtype = load(len(text).to_bytes(LENGTH_BYTES, "little") + text)[""].dtype
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"safetensors has no dtype {name!r}") from error
    return dtype


def _header(ordered: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> bytes:
    if METADATA in ordered:
        raise SaveError(f"a safetensors file cannot hold a tensor of the name {METADATA}")
    described: dict[str, object] = {} if metadata is None else {METADATA: dict(metadata)}
    end = 0
    for key, tensor in ordered.items():
        start, end = end, end + tensor.nbytes
        described[key] = {"dtype": _dtype(tensor.dtype), "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    if len(text) > HEADER_BYTES_MAX - BLOCK_BYTES:
        raise SaveError(
            f"{len(ordered)} tensors are too many for one safetensors file: their header has {len(text)} bytes"
        )
    text += b" " * (-(LENGTH_BYTES + len(text)) % BLOCK_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


@cache
def _dtype(dtype: torch.dtype) -> str:
    """The library's name of it.

    Raises:
        SaveError: the library has none, or several elements to a byte.
    """
    one = torch.empty(1, dtype=dtype, device="cpu")
    try:
        saved = save({"": one})
    except (SafetensorError, KeyError, ValueError) as error:
        raise SaveError(f"safetensors cannot hold {dtype}: {error}") from error
    described = json.loads(saved[LENGTH_BYTES : len(saved) - one.nbytes])[""]
    if described["shape"] != [1]:
        raise SaveError(f"safetensors holds {dtype} with several elements to a byte, which is not supported")
    name: str = described["dtype"]
    return name


def _runs(ordered: Mapping[str, torch.Tensor]) -> list[NDArray[numpy.uint8]]:
    """The tensors' bytes, with those that follow each other in one storage joined."""
    found: list[tuple[torch.UntypedStorage, int, int]] = []  # storage, its first byte and the one after the last
    for key, tensor in ordered.items():
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise SaveError(f"{key} cannot be written: it is not contiguous in the host's memory")
        if not tensor.nbytes:
            continue
        storage = tensor.untyped_storage()
        start = tensor.data_ptr() - storage.data_ptr()
        end = start + tensor.nbytes
        if found and found[-1][0].data_ptr() == storage.data_ptr() and found[-1][2] == start:
            start = found.pop()[1]
        found.append((storage, start, end))
    return [_bytes(*one) for one in found]


def _bytes(storage: torch.UntypedStorage, start: int, end: int) -> NDArray[numpy.uint8]:
    """These bytes of a storage."""
    view = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, start, (end - start,), (1,))
    array: NDArray[numpy.uint8] = view.numpy()
    return array
