"""The run's identity, stored beside every copy at a target, so that a new run directory can adopt it."""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from cpsr.checkpoint.files import make_directory, write_bytes

__all__ = ["IDENTITY", "Identity", "read_identity", "write_identity"]

IDENTITY = "run.json"  # in the run's directory, and in every folder at a target


class Identity(BaseModel):
    """The identity in `run.json`; other content of that file is kept.

    Attributes:
        run_id: random, drawn once. File names contain it, so it must not be a path.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    run_id: Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z_-]{1,64}$")]
    world_size: Annotated[int, Field(ge=1)]
    tensors: dict[str, tuple[int, ...]]
    zero_stage: Any
    precision: Any
    optimizer: Any

    @classmethod
    def parse(cls, data: bytes) -> "Identity":
        """Read the form at a target: one line of JSON, and its SHA-256.

        Raises:
            ValueError: it is torn or altered, or not the identity of a run.
        """
        line, _, digest = data.partition(b"\n")
        if digest != _digest(line):
            raise ValueError("its SHA-256 does not fit; it is torn or altered")
        return cls.model_validate(json.loads(line))

    def to_bytes(self) -> bytes:
        """The form at a target."""
        line = json.dumps(self.model_dump(), sort_keys=True).encode("ascii")
        return line + b"\n" + _digest(line)


def read_identity(run_dir: Path) -> Identity | None:
    """The identity of a run directory, None where it has none yet.

    Raises:
        OSError: the file system refused.
        ValueError: it is damaged.
    """
    try:
        return Identity.model_validate(json.loads((run_dir / IDENTITY).read_bytes()))
    except FileNotFoundError:
        return None


def write_identity(run_dir: Path, identity: Identity) -> None:
    """Give a new run directory an identity.

    Raises:
        OSError: the file system refused.
    """
    make_directory(run_dir, fsync=True)
    write_bytes(run_dir / IDENTITY, json.dumps(identity.model_dump(), indent=1).encode("ascii"), fsync=True)


def _digest(line: bytes) -> bytes:
    return hashlib.sha256(line).hexdigest().encode("ascii") + b"\n"
