"""What checks leave in a work folder and in shared memory."""

import json
import shutil
from collections.abc import Collection
from pathlib import Path

from cpsr.checkpoint.memory_removal import remove_memory_states
from cpsr.checkpoint.run_directory import IDENTITY

__all__ = ["clear", "folder_name", "release_memory"]


def folder_name(trial: str) -> str:
    """The name of a check as that of its folder."""
    return trial.replace(": ", "--").replace(" ", "-")


def clear(folder: Path) -> None:
    """Remove what an earlier call left in its work folder, and its shared memory."""
    release_memory(folder)
    for path in folder.glob("rank-*.jsonl"):
        path.unlink()
    for path in folder.glob("*--*"):
        shutil.rmtree(path, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)


def release_memory(folder: Path, spared: Collection[str] = ()) -> int:
    """Free this machine's shared memory of the checks in a work folder; returns the bytes.

    Args:
        folder: the work folder.
        spared: names of folders in it whose memory stays.
    """
    freed = 0
    for identity in folder.glob(f"*/run/{IDENTITY}"):
        if identity.parts[-3] not in spared:
            freed += remove_memory_states(json.loads(identity.read_text(encoding="utf-8"))["run_id"])
    return freed
