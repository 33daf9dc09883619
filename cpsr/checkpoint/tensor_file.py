"""Files of tensors (safetensors): their bytes in memory, their header, and their tensors read or mapped."""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save

from cpsr.checkpoint.direct_file import BLOCK_BYTES, HASHED_PIECE_BYTES
from cpsr.errors import SaveError

__all__ = ["HEADER_BYTES_MAX", "LENGTH_BYTES", "METADATA", "NO_HEADER", "MappedTensors", "PlacedTensor"]
__all__ += ["TensorHeader", "bytes_of", "dtype_of", "header_of", "image_of", "in_file_order"]
__all__ += ["in_memory_order", "members_of", "placed_after"]

LENGTH_BYTES = 8  # a safetensors file starts with its header's length, little-endian
HEADER_BYTES_MAX = 100_000_000  # the library reads no longer one
METADATA = "__metadata__"
LARGE_BYTES = 16 << 20  # of a file, beside which a MiB is little


def image_of(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> list[NDArray[numpy.uint8]]:
    """The content of a safetensors file: the header, filled up to whole blocks, then the tensors.

    The header of a large file is filled up to whole MiB: its data then has the same MiB in the file as in memory, where
    they may have been hashed already.

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
    members, runs = members_of(placed_after(0, ordered)), runs_of(ordered)
    unit = HASHED_PIECE_BYTES if sum(run.nbytes for run in runs) >= LARGE_BYTES else BLOCK_BYTES
    return [numpy.frombuffer(b"".join(header_of(metadata, [members], unit=unit)), numpy.uint8), *runs]


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


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor that a header describes; `first` is its first byte in the file, or as the caller counts."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    first: int

    @property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """The byte after its last one."""
        return self.first + self.numel * self.dtype.itemsize

    def view(self, content: torch.Tensor) -> torch.Tensor:
        """The tensor in these bytes, in which it lies at `first`."""
        return content[self.first : self.end].view(self.dtype).view(self.shape)


def placed_after(first: int, tensors: Mapping[str, torch.Tensor]) -> list[PlacedTensor]:
    """The tensors one after the other, from this byte on."""
    placed = []
    for name, tensor in tensors.items():
        placed.append(PlacedTensor(name, tuple(tensor.shape), tensor.dtype, first))
        first += tensor.nbytes
    return placed


def members_of(tensors: Iterable[PlacedTensor], start: int = 0) -> bytes:
    """What a header says of tensors that lie one after the other without gaps; the data begins at byte `start`.

    Raises:
        SaveError: safetensors cannot hold a tensor's dtype or name.
    """
    described = {
        one.name: {
            "dtype": _dtype(one.dtype),
            "shape": list(one.shape),
            "data_offsets": [one.first - start, one.end - start],
        }
        for one in tensors
    }
    if METADATA in described:
        raise SaveError(f"a safetensors file cannot hold a tensor of the name {METADATA}")
    return _json(described)[1:-1]


def header_of(
    metadata: Mapping[str, str] | None, members: Iterable[bytes], size: int | None = None, unit: int = BLOCK_BYTES
) -> list[bytes]:
    """The pieces of a file's header, of which the length is the first.

    Args:
        metadata: of the file, which comes first.
        members: of `members_of`, in the order of the data.
        size: that spaces fill it up to; None: to whole units.
        unit: bytes of one.

    Raises:
        SaveError: it is longer than that, or than the library reads.
    """
    texts = [] if metadata is None else [_json({METADATA: dict(metadata)})[1:-1]]
    text = b",".join([*texts, *filter(None, members)])
    wanted, most = LENGTH_BYTES + len(text) + len("{}"), HEADER_BYTES_MAX if size is None else size
    end = -(-wanted // unit) * unit if size is None else size
    if end > most or wanted > end:
        raise SaveError(f"there are too many tensors for one file: their header has {wanted} bytes of {most}")
    return [(end - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little"), b"{", text, b"}", b" " * (end - wanted)]


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


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


def runs_of(ordered: Mapping[str, torch.Tensor]) -> list[NDArray[numpy.uint8]]:
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


# What reading a header raises that is none.
NO_HEADER = (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError)


class TensorHeader:
    """The header of a safetensors file, from the file's first bytes.

    Args:
        file_bytes: length of the whole file.

    Attributes:
        end: the byte behind it, as far as that is known.
        whole: whether all of it was taken.
    """

    def __init__(self, file_bytes: int) -> None:
        self.end = LENGTH_BYTES
        self.whole = False
        self._file_bytes = file_bytes
        self._taken = bytearray()

    def take(self, piece: memoryview) -> None:
        """Take the bytes that follow, as far as they are the header's.

        Raises:
            ValueError: a header of this length is none.
        """
        while piece and len(self._taken) < self.end:
            part = piece[: self.end - len(self._taken)]
            self._taken += part
            piece = piece[len(part) :]
            if len(self._taken) == LENGTH_BYTES:
                self.end += int.from_bytes(self._taken, "little")
                if self.end > min(self._file_bytes, LENGTH_BYTES + HEADER_BYTES_MAX):
                    raise ValueError(f"its header would end at byte {self.end}")
        self.whole = len(self._taken) == self.end

    def tensors(self) -> Iterator[PlacedTensor]:
        """The tensors as they follow each other in the file; call it once the header is whole.

        Raises:
            Exception: any of `NO_HEADER`: it describes no tensors that this file can hold.
        """
        end = self.end
        described = json.loads(self._taken[LENGTH_BYTES:])
        described.pop(METADATA, None)
        for name, one in sorted(described.items(), key=lambda item: item[1]["data_offsets"]):
            (first, last), shape, dtype = one["data_offsets"], tuple(one["shape"]), dtype_of(one["dtype"])
            first, last = self.end + first, self.end + last
            lies_there = end <= first and first + math.prod(shape) * dtype.itemsize == last <= self._file_bytes
            if min(shape, default=0) < 0 or not lies_there:
                raise ValueError(f"{name!r} of shape {shape} and {dtype} lies at {first} to {last}")
            end = last
            yield PlacedTensor(name, shape, dtype, first)

    def metadata(self) -> dict[str, str]:
        """The file's metadata, where they come first as `header_of` has them; call it once the header is whole.

        Raises:
            Exception: any of `NO_HEADER`.
        """
        text, first = self._taken[LENGTH_BYTES:].decode(), f'{{"{METADATA}":'
        if not text.startswith(first):
            raise ValueError("it has no metadata at its start")
        return dict(json.JSONDecoder().raw_decode(text, len(first))[0])

    @property
    def content(self) -> bytes:
        """Its bytes, with the length."""
        return bytes(self._taken)


class MappedTensors:
    """The tensors of a safetensors file, by name.

    The library makes a view at some 50 us a piece, most of which torch spends on the way there. The predictor reads
    hundreds of small pieces of each checkpoint, and a view of this map takes 3 us.

    Args:
        path: a file that was verified, or whose header the library has accepted.

    Raises:
        ValueError: it is no safetensors file.
        OSError: it cannot be looked up.
        RuntimeError: it cannot be mapped.
    """

    def __init__(self, path: Path) -> None:
        size = path.stat().st_size
        self._data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8, device="cpu")
        header = TensorHeader(size)
        try:
            header.take(self._data.numpy().data)
            # Little for each tensor, and names that all files share: a history has dozens of files of thousands.
            self._places = {sys.intern(one.name): (one.dtype, one.first, one.end) for one in header.tensors()}
        except NO_HEADER as error:
            raise ValueError(f"it is no safetensors file: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def flat(self, name: str) -> torch.Tensor:
        """All elements of a tensor, `(numel,)` of its own type, as a view of the file.

        Raises:
            ValueError: there is none of that name, or it is of another type than a floating-point one.
        """
        if name not in self._places:
            raise ValueError(f"the file has no tensor {name!r}")
        dtype, first, end = self._places[name]
        if not dtype.is_floating_point:
            raise ValueError(f"{name!r} is of {dtype}")
        return self._data[first:end].view(dtype)
