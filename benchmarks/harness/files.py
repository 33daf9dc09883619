"""Files that are either whole or absent, whenever the benchmark is stopped."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from cpsr.errors import CPSRError

__all__ = ["open_tensors", "read_json", "write_json", "write_tensors"]


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file under a temporary name and rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    save_file(dict(tensors), temporary, metadata)
    temporary.replace(path)


def write_json(path: Path, content: Any) -> None:
    """Write plain data under a temporary name and rename it.

    Raises:
        ValueError: a number is NaN or infinite, which JSON does not have.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    temporary.write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
    temporary.replace(path)


def read_json(path: Path) -> Any:
    """The file's content, None where there is no such file.

    Raises:
        CPSRError: it holds something else than JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise _damaged(path, error) from error


def open_tensors(path: Path) -> Any:
    """Map a safetensors file; the result is safetensors' own, which has no types.

    Raises:
        CPSRError: it is torn or no such file.
    """
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise _damaged(path, error) from error


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def _damaged(path: Path, error: Exception) -> CPSRError:
    return CPSRError(f"{path} cannot be read ({error}); the rest of the cache is kept: remove this file and run again")
