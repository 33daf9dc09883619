"""The texts that the language models learn: each is on every machine that runs CPSR."""

from collections.abc import Callable
from pathlib import Path

import torch

from cpsr.demo.corpus import read_corpus, split_files
from cpsr.errors import ConfigError

__all__ = ["CORPORA", "read_headers"]


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


CORPORA: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {"library": read_corpus, "headers": read_headers}
