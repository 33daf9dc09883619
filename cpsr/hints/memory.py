"""The memory under tensors and arrays: saved once, however many of them share it."""

import ctypes
from array import array
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import xxhash
from numpy.typing import NDArray

__all__ = ["Block", "Memory", "UnsavableError", "memory_text"]

Bytes = NDArray[numpy.uint8]


class UnsavableError(Exception):
    """Why a value cannot be saved, and what to do, in the words of a message that has already named it."""


@dataclass(frozen=True)
class Block:
    """One piece of memory.

    Attributes:
        owner: a torch storage or a NumPy array, which keeps it.
        bytes: all of it, as a view `(bytes,)` that does not keep it.
        address: of its first byte.
    """

    owner: Any
    bytes: Bytes
    address: int

    @staticmethod
    def of_storage(storage: torch.UntypedStorage) -> "Block":
        """The block of a torch storage."""
        address, size = storage.data_ptr(), storage.nbytes()
        # Not by `Tensor.numpy()`, after which torch does not let the storage grow any more.
        raw: Any = (ctypes.c_uint8 * size).from_address(address) if size else b""
        return Block(storage, numpy.frombuffer(raw, numpy.uint8), address)

    def storage(self) -> torch.UntypedStorage:
        """The memory for tensors, which keep it."""
        is_storage = isinstance(self.owner, torch.UntypedStorage)
        found: torch.UntypedStorage = self.owner if is_storage else torch.from_numpy(self.bytes).untyped_storage()
        return found

    def buffer(self) -> Bytes:
        """The memory for arrays, which keep it."""
        if not isinstance(self.owner, torch.UntypedStorage):
            return self.bytes
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(self.owner).numpy()

    def digest(self) -> str:
        """Hash of its bytes."""
        return xxhash.xxh3_128(self.bytes.data).hexdigest()


def memory_text(value: Any) -> Any:
    """Kind, shape and hash of a tensor, an array or bytes; None for anything else."""
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized:
        bits = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        return [str(value.dtype), list(value.shape), xxhash.xxh3_128(bits.numpy().data).hexdigest()]
    if isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
        return [value.dtype.str, list(value.shape), xxhash.xxh3_128(value.tobytes()).hexdigest()]
    if isinstance(value, bytearray | memoryview | array):
        return xxhash.xxh3_128(bytes(value)).hexdigest()
    return None


class Memory:
    """Blocks in the order in which they were met."""

    def __init__(self, blocks: list[Block] | None = None) -> None:
        self.blocks = list(blocks or [])
        self._index = {_key(block): number for number, block in enumerate(self.blocks)}

    def of_tensor(self, tensor: torch.Tensor) -> int:
        """Number of the block of a dense CPU tensor."""
        return self._number(Block.of_storage(tensor.untyped_storage()))

    def of_array(self, array: NDArray[Any]) -> tuple[int, int]:
        """Number of the block of an array, and the array's first byte in it.

        Raises:
            UnsavableError: the memory is of something else than an array or a tensor.
        """
        owner: Any = array
        while isinstance(owner.base, numpy.ndarray):
            owner = owner.base
        at = array.__array_interface__["data"][0]
        if isinstance(owner.base, torch.Tensor):
            number = self.of_tensor(owner.base)
        elif owner.base is not None:
            raise UnsavableError(f"its memory belongs to a {type(owner.base).__name__}: copy() the array")
        elif not (owner.flags.c_contiguous or owner.flags.f_contiguous):
            raise UnsavableError("the array has gaps in its memory: copy() it")
        else:
            raw = (owner if owner.flags.c_contiguous else owner.T).reshape(-1).view(numpy.uint8)
            number = self._number(Block(owner, raw, owner.__array_interface__["data"][0]))
        return number, at - self.blocks[number].address

    def overlapping(self) -> tuple[int, int] | None:
        """Two blocks that share a part of their memory alone; they would be apart after a restart."""
        order = sorted((block.address, number) for number, block in enumerate(self.blocks) if len(block.bytes))
        end, last = -1, -1
        for address, number in order:
            if address < end:
                return last, number
            end, last = address + len(self.blocks[number].bytes), number
        return None

    def _number(self, block: Block) -> int:
        number = self._index.setdefault(_key(block), len(self.blocks))
        if number == len(self.blocks):
            self.blocks.append(block)
        return number


def _key(block: Block) -> tuple[int, int]:
    """Of memory; pieces of no bytes are apart."""
    return (block.address, len(block.bytes)) if len(block.bytes) else (-1 - id(block.owner), 0)
