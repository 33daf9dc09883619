"""Files of other tools, which are pickles: read here alone, by unpicklers that call nothing outside of a short list.

Every other file that CPSR reads is none (SECURITY.md).
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from cpsr.errors import CheckpointError

__all__ = ["ListedUnpickler", "load_file", "loaded"]

_WAY_OUT = (
    "Nothing was executed and nothing was written. Where you trust the file, load it with the tool that wrote it and "
    "save it again with tensors and plain data alone"
)


def load_file(path: Path, classes: Sequence[Any] = ()) -> Any:
    """What `torch.save` wrote, its tensors mapped from the file where its form allows it.

    Args:
        path: the file.
        classes: allowed beside tensors and plain data; making them and setting their attributes has no effects.

    Raises:
        CheckpointError: it is absent, damaged, or holds other objects.
    """
    try:
        with torch.serialization.safe_globals([OrderedDict, *classes]):
            try:
                return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            except RuntimeError:  # not an archive, or not as a whole
                return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is absent: the checkpoint is not whole. Nothing was written") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError, AttributeError) as error:
        raise _refused(path, error) from error


def loaded(data: bytes, path: Path) -> Any:
    """What `torch.save` wrote into a part of a file: tensors and plain data alone.

    Raises:
        CheckpointError: it is damaged, or holds other objects.
    """
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, AttributeError) as error:
        raise _refused(path, error) from error


class ListedUnpickler(pickle.Unpickler):
    """Finds classes and functions of a list, and nothing else.

    Args:
        file: the pickle.
        path: of it, for messages.
        listed: by module and name as they stand in the pickle.
    """

    def __init__(self, file: BinaryIO, path: Path, listed: dict[tuple[str, str], Any]) -> None:
        super().__init__(file)
        self._path = path
        self._listed = listed

    def find_class(self, module: str, name: str) -> Any:
        """The object of that name.

        Raises:
            CheckpointError: it is not listed.
        """
        if (module, name) not in self._listed:
            raise CheckpointError(f"{self._path} asks for {module}.{name}, which is not allowed. {_WAY_OUT}")
        return self._listed[module, name]

    def value(self) -> Any:
        """What the file holds.

        Raises:
            CheckpointError: it is damaged, or asks for what is not listed.
        """
        try:
            return self.load()
        except CheckpointError:
            raise
        except Exception as error:
            raise _refused(self._path, error) from error


def _refused(path: Path, error: Exception) -> CheckpointError:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return CheckpointError(f"{path} cannot be read as tensors and plain data ({first}). {_WAY_OUT}")
