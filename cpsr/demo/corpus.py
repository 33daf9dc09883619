"""Text that every machine has, as bytes: the source code of Python's own standard library."""

import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.utils.data import Dataset

__all__ = ["Windows", "read_corpus", "split_files"]

CORPUS_BYTES = 8_000_000  # enough that a demo run never sees a window twice
VALIDATION_EVERY = 20  # every 20th file is for validation


def read_corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """Training and validation text.

    Returns:
        Two 1-D uint8 tensors; the files of one never occur in the other.

    Raises:
        FileNotFoundError: this Python has no readable standard library sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(root.rglob("*.py")) if "site-packages" not in path.parts]
    if not files:
        raise FileNotFoundError(f"no Python sources under {root}: the demo trains on the standard library's source")
    return split_files(files)


def split_files(files: Iterable[Path]) -> tuple[torch.Tensor, torch.Tensor]:
    """Training and validation text of the first files that hold 8 MB: every 20th is for validation.

    Returns:
        Two 1-D uint8 tensors.
    """
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    size = 0
    for index, path in enumerate(files):
        text = path.read_bytes()
        parts[index % VALIDATION_EVERY == 0].append(text)
        size += len(text)
        if size >= CORPUS_BYTES:
            break
    train, validation = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts)
    return train, validation


class Windows(Dataset[torch.Tensor]):
    """Windows of `length + 1` bytes, one every `length` bytes.

    Items are int64 tensors of shape `(length + 1,)`: inputs are all but the last byte, targets all but the first.
    """

    def __init__(self, text: torch.Tensor, length: int) -> None:
        self._text = text
        self._length = length

    def __len__(self) -> int:
        return (self._text.numel() - 1) // self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * self._length
        return self._text[start : start + self._length + 1].long()
