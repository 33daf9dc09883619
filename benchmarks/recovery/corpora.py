"""The texts that the language models learn: each is on every machine that runs CPSR."""

from collections.abc import Callable, Iterable
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from cpsr.demo.model import read_corpus, split_files
from cpsr.errors import ConfigError

__all__ = ["CORPORA", "read_descriptions", "read_documentation", "read_headers", "read_library"]

# Every so many pieces are held out: a twelfth of the text of either.
TOPICS_VALIDATION_EVERY = 12
PACKAGES_VALIDATION_EVERY = 14


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

    return _split((topics[name] for name in sorted(topics)), TOPICS_VALIDATION_EVERY)


@cache
def read_descriptions() -> tuple[torch.Tensor, torch.Tensor]:
    """Training and validation text of what the installed packages say about themselves, by package.

    Mostly English with some code, about a megabyte; it depends on the packages that are installed, but not on this one.
    """
    known = {package.metadata["Name"].lower(): package.metadata for package in metadata.distributions()}
    known.pop("cpsr", None)
    texts = (str(known[name].json.get("description", "")) for name in sorted(known))
    return _split(texts, PACKAGES_VALIDATION_EVERY)


def _split(pieces: Iterable[str], validation_every: int) -> tuple[torch.Tensor, torch.Tensor]:
    parts: tuple[list[str], list[str]] = ([], [])
    for place, text in enumerate(pieces):
        parts[place % validation_every == 0].append(text)
    training, validation = (torch.frombuffer(bytearray("".join(part).encode()), dtype=torch.uint8) for part in parts)
    return training, validation


CORPORA: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
    "library": read_library,
    "headers": read_headers,
    "documentation": read_documentation,
    "descriptions": read_descriptions,
}
