"""Runs a program beside file systems of its own, which nobody else sees and which end with it."""

import functools
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LIMIT_SECONDS = 120.0

PRELUDE = """
import json
from pathlib import Path
from cpsr.config import CPSRConfig
from cpsr.doctor.needs import Launched, Needs
place = Path({place!r})
def needs(state_bytes=None, ranks=1, local_ranks=1, run_dir=place, **settings):
    launched = Launched(ranks, local_ranks, -(-ranks // local_ranks))
    return Needs(CPSRConfig(run_dir=run_dir, **settings), launched, state_bytes)
def show(*found):
    print(json.dumps([one.to_json() for one in found]))
"""


@functools.cache
def obstacle() -> str | None:
    """Why nothing can be mounted here; None if it can."""
    tried = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
    try:
        ended = subprocess.run(tried, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    except OSError as error:
        return f"mounting needs unshare: {error}"
    return None if ended.returncode == 0 else f"mounting needs root: {ended.stderr.strip()}"


def mounted(place: Path, options: str, script: str, more: str = "", within: str = "") -> list[dict[str, Any]]:
    """What a script shows that has a tmpfs at a place, as `show` has it.

    Args:
        place: an existing directory.
        options: of the tmpfs, as `size=1m`.
        script: sees `place`, `needs`, `show` and what it imports.
        more: a command of the shell after the mount.
        within: a command that runs the script, as `setpriv`.
    """
    if (why := obstacle()) is not None:
        pytest.skip(why)
    command = (
        f'mount -t tmpfs -o {options} tmpfs {shlex.quote(str(place))} && {more or "true"} && exec {within} "$0" -c "$1"'
    )
    ended = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command, sys.executable, PRELUDE.format(place=str(place)) + script],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(ended.stdout.splitlines()[-1])
    return found
