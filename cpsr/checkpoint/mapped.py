"""A file of tensors that is mapped once: pieces of a tensor are views of it."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

__all__ = ["MappedTensors"]

LENGTH_BYTES = 8  # before the header: its length, little-endian
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class MappedTensors:
    """The tensors of a safetensors file, by name.

    The library makes a view at some 50 us a piece, most of which torch spends on the way there. The predictor reads
    hundreds of small pieces of each checkpoint, and a view of this map takes 3 us.

    Args:
        path: a file that was verified, or whose header the library has accepted.

    Raises:
        ValueError: it is no safetensors file, or has a tensor of another type than a floating-point one.
        OSError: it cannot be looked up.
        RuntimeError: it cannot be mapped.
    """

    def __init__(self, path: Path) -> None:
        size = path.stat().st_size
        if size < LENGTH_BYTES:
            raise ValueError(f"{size} bytes hold no header")
        data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8, device="cpu")
        begin = LENGTH_BYTES + int.from_bytes(_bytes(data[:LENGTH_BYTES]), "little")
        if begin > size:
            raise ValueError(f"its header ends at byte {begin}, the file at {size}")
        header: Any = json.loads(_bytes(data[LENGTH_BYTES:begin]))
        self._data = data[begin:]
        # Little for each tensor, and names that all files share: a history has dozens of files of thousands.
        self._places = {
            sys.intern(name): (sys.intern(one["dtype"]), *one["data_offsets"])
            for name, one in header.items()
            if name != "__metadata__"
        }

    def flat(self, name: str) -> torch.Tensor:
        """All elements of a tensor, `(numel,)` of its own type, as a view of the file.

        Raises:
            ValueError: there is none of that name, or it is damaged.
        """
        if name not in self._places:
            raise ValueError(f"the file has no tensor {name!r}")
        dtype, first, last = self._places[name]
        if dtype not in DTYPES or not 0 <= first <= last <= len(self._data):
            raise ValueError(f"{name!r} has type {dtype} and lies at {first} to {last} of {len(self._data)}")
        return self._data[first:last].view(DTYPES[dtype])


def _bytes(values: torch.Tensor) -> bytes:
    return values.numpy().tobytes()
