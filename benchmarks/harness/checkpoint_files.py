"""Where the files of a checkpoint lie, for what damages, counts or compares them.

No other file of the benchmarks and the tests spells these names out, but the tests of the layout itself.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from cpsr.checkpoint.catalogue import scan
from cpsr.checkpoint.history import RankSlices
from cpsr.checkpoint.manifest import (
    COMMIT,
    SLABS,
    Manifest,
    RankManifest,
    experts_taken_at,
    holds_frozen,
    holds_weights,
    saved_at,
    slab_path,
    step_iteration,
)
from cpsr.checkpoint.saved import places_of

__all__ = ["Kind", "checkpoint_files", "commit_file", "counterpart", "directory_bytes", "edit_commit", "edit_part"]
__all__ += [
    "expert_files",
    "files_left",
    "frozen_files",
    "is_rest",
    "is_slab",
    "is_thinned",
    "kind_of",
    "listed_anyhow",
]
__all__ += ["of_other_rank", "rank_part", "record_files", "remove_checkpoint", "rest_file", "slab_files", "slab_names"]
__all__ += ["slices_in", "small_state_file", "steps_in", "weights_file"]

Kind = Literal["weights", "rest", "expert-weights", "expert-rest", "frozen"]


def slab_files(directory: Path, rank: int | None = None, kind: Kind | None = None) -> list[Path]:
    """Files of tensors that the checkpoint in this directory lists, whether or not it is committed.

    Args:
        directory: of the checkpoint.
        rank: that wrote them; None: all.
        kind: what is in them; None: anything.
    """
    found = set()
    for part in sorted(directory.glob("rank-*.json")) if rank is None else [rank_part(directory, rank)]:
        found.update(slab_names(RankManifest.parse(part.read_bytes()), kind))
    return sorted(slab_path(directory, name) for name in found if holds_weights(name) or not is_thinned(directory))


def listed_anyhow(directory: Path) -> set[str]:
    """Names of the slabs that any readable file of a checkpoint lists, damaged or not; of a thinned one, of weights."""
    listed: set[str] = set()
    for path in [path for path in record_files(directory) if path.is_file() and not path.is_symlink()]:
        with suppress(ValueError, LookupError, TypeError, AttributeError):
            content = path.read_bytes()
            found = json.loads(content[content.index(b"{") :])
            for part in [found] if path.suffix == ".json" else found["ranks"].values():
                listed |= part["files"].keys()
    return {name for name in listed if holds_weights(name) or not is_thinned(directory)}


def slab_names(record: RankManifest, kind: Kind | None = None) -> list[str]:
    """Names of the files of tensors of a rank's part."""
    return [name for name in record.files if kind in (None, kind_of(name))]


def weights_file(directory: Path, rank: int = 0) -> Path:
    """A rank's weights, but those of experts with files of their own."""
    (found,) = slab_files(directory, rank, "weights")
    return found


def rest_file(directory: Path, rank: int = 0) -> Path:
    """A rank's moments, as `weights_file`."""
    return max(slab_files(directory, rank, "rest"))


def small_state_file(directory: Path, rank: int = 0) -> Path:
    """A rank's buffers, and the tensors of its small state."""
    return min(slab_files(directory, rank, "rest"))


def expert_files(directory: Path, rank: int | None = None) -> list[Path]:
    """Weights and moments of experts that have files of their own."""
    return [path for path in slab_files(directory, rank) if kind_of(path.name).startswith("expert-")]


def frozen_files(directory: Path) -> list[Path]:
    """Parameters outside the optimizer, of all ranks."""
    return slab_files(directory, kind="frozen")


def rank_part(directory: Path, rank: int = 0) -> Path:
    """The manifest of a rank's part, of an iteration that was saved once."""
    (found,) = directory.glob(f"rank-{rank:05d}-*.json")
    return found


def commit_file(directory: Path) -> Path:
    """The file by which the checkpoint exists."""
    return directory / COMMIT


def record_files(directory: Path) -> list[Path]:
    """All files of a committed checkpoint but the tensors, that of the commit last."""
    return [*sorted(directory.glob("rank-*.json")), commit_file(directory)]


def checkpoint_files(directory: Path) -> list[Path]:
    """All files of a committed checkpoint."""
    return [*slab_files(directory), *record_files(directory)]


def files_left(directory: Path) -> list[str]:
    """Names of all files that there are of a checkpoint, listed or not."""
    slabs = (
        path for path in slab_path(directory, "").iterdir() if saved_at(path.name) == step_iteration(directory.name)
    )
    return sorted(path.name for path in (*directory.iterdir(), *slabs))


def steps_in(checkpoints: Path) -> list[str]:
    """Names of all that there is in a run's directory of checkpoints, but of what their tensors lie in."""
    return sorted(path.name for path in checkpoints.iterdir() if path.name != SLABS)


def remove_checkpoint(directory: Path) -> None:
    """Remove a checkpoint, and what no other one has in common with it."""
    shutil.rmtree(directory)


def counterpart(path: Path, directory: Path) -> Path:
    """Where another checkpoint would have what this file is in its own.

    Args:
        path: a file of a checkpoint.
        directory: of the other one.
    """
    at, other = saved_at(path.name), step_iteration(directory.name)
    if at is None or other is None:
        return slab_path(directory, path.name) if is_slab(path) else directory / path.name
    return slab_path(directory, path.name.replace(f"-{at:010d}-", f"-{other:010d}-"))


def of_other_rank(path: Path) -> Path | None:
    """The same file of rank 1; None where this one is not of rank 0."""
    first, second = "rank-00000", "rank-00001"
    return path.with_name(path.name.replace(first, second)) if path.name.startswith(first) else None


def directory_bytes(directory: Path) -> int:
    """Bytes of all files of a committed checkpoint."""
    return sum(path.stat().st_size for path in checkpoint_files(directory))


def kind_of(name: str) -> Kind:
    """What is in a file of tensors, by its name."""
    if holds_frozen(name):
        return "frozen"
    if experts_taken_at(name) is not None:
        return "expert-weights" if holds_weights(name) else "expert-rest"
    return "weights" if holds_weights(name) else "rest"


def is_slab(path: Path) -> bool:
    """Whether a file of a checkpoint holds tensors."""
    return path.suffix == ".safetensors"


def is_rest(path: Path, iteration: int) -> bool:
    """Whether a file that is read or written is a `rest_file` of a checkpoint, or the temporary one for it."""
    return f".moments-{iteration:010d}-" in path.name


def is_thinned(directory: Path) -> bool:
    """Whether the checkpoint was thinned to its weights."""
    try:
        return Manifest.parse(commit_file(directory).read_bytes()).weights_only
    except (OSError, ValueError):
        return False


def edit_part(directory: Path, edit: Callable[[dict[str, Any]], object], rank: int = 0, *, relist: bool = True) -> None:
    """Change the manifest of a rank's part, and all hashes above it, as whoever can write there could.

    Args:
        directory: of the checkpoint.
        edit: of the manifest as JSON.
        rank: whose part.
        relist: the commit lists the files that this part then lists.
    """
    path = rank_part(directory, rank)
    record = json.loads(path.read_bytes())
    edit(record)
    path.write_bytes(json.dumps(record).encode())

    def follow(manifest: dict[str, Any]) -> None:
        listed = manifest["ranks"][str(rank)]
        listed["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        if relist:
            listed["files"] = {name: file | {"pieces": None} for name, file in record["files"].items()}

    edit_commit(directory, follow)


def edit_commit(directory: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change what the commit says, and its hash.

    Args:
        directory: of the checkpoint.
        edit: of the commit as JSON.
    """
    manifest = json.loads(commit_file(directory).read_bytes().partition(b"\n")[2])
    edit(manifest)
    data = json.dumps(manifest).encode()
    commit_file(directory).write_bytes(hashlib.sha256(data).hexdigest().encode() + b"\n" + data)


def slices_in(checkpoints: Path, rank: int = 0) -> RankSlices:
    """What a rank owns by the newest checkpoint of a run."""
    newest = scan(checkpoints).checkpoints[-1]
    pieces = {key.removeprefix("param/"): piece for key, piece, _ in places_of(newest.record(rank), "param/")}
    return RankSlices(rank, newest.manifest.world_size, pieces)
