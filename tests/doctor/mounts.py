"""Runs a program beside file systems of its own, which nobody else sees and which end with it."""

import functools
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

LIMIT_SECONDS = 120.0


@functools.cache
def obstacle() -> str | None:
    """Why nothing can be mounted here; None if it can."""
    tried = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
    try:
        ended = subprocess.run(tried, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    except OSError as error:
        return f"mounting needs unshare: {error}"
    return None if ended.returncode == 0 else f"mounting needs root: {ended.stderr.strip()}"


def mounted(
    place: Path, options: str, command: Sequence[str], more: str = "true"
) -> "subprocess.CompletedProcess[str]":
    """Run a command that has a tmpfs at a place.

    Args:
        place: an existing directory.
        options: of the tmpfs, as `size=1m`.
        command: a program and its arguments.
        more: a command of the shell after the mount.
    """
    if (why := obstacle()) is not None:
        pytest.skip(why)
    script = f'mount -t tmpfs -o {options} tmpfs {shlex.quote(str(place))} && {more} && exec "$@"'
    wanted = ["unshare", "--mount", "sh", "-c", script, "sh", *command]
    return subprocess.run(wanted, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
