"""The texts that the language models learn: each is on every machine that runs CPSR."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from cpsr.demo.corpus import read_corpus, split_files
from cpsr.errors import ConfigError

__all__ = ["CORPORA", "read_documentation", "read_headers", "read_library"]

VALIDATION_EVERY = 12  # every so many topics are held out: an eighth of the text


@cache
def read_library() -> tuple[torch.Tensor, torch.Tensor]:
    """Training and validation text of Python's own library, read once in a process."""
    return read_corpus()


@cache
def read_headers() -> tuple[torch.Tensor, torch.Tensor]:
    """Training and validation text of the C++ headers that torch installs, as of `split_files`.

    Raises:
        ConfigError: this torch has none.
    """
    root = Path(torch.__file__).parent / "include"
    files = sorted(root.rglob("*.h"))
    if not files:
        raise ConfigError(f"no C++ headers under {root}: this torch was installed without them")
    return split_files(files)


@cache
def read_documentation() -> tuple[torch.Tensor, torch.Tensor]:
    """Training and validation text of the language reference that Python's `help()` shows, by topic."""
    from pydoc_data.topics import topics  # half a megabyte, for this one task

    parts: tuple[list[str], list[str]] = ([], [])
    for place, name in enumerate(sorted(topics)):
        parts[place % VALIDATION_EVERY == 0].append(topics[name])
    training, validation = (torch.frombuffer(bytearray("".join(part).encode()), dtype=torch.uint8) for part in parts)
    return training, validation


CORPORA: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
    "library": read_library,
    "headers": read_headers,
    "documentation": read_documentation,
}
