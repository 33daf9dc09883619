"""The owner of a run's files in shared memory: one small file beside them, written before any of them.

::

    cpsr-<run_id>-owner        JSON: the run directory, the machine, and which directories these were

Device and inode numbers of a run directory and of its parent distinguish it from another one of the same path: a
container sees other directories under the same paths, and so does a machine where a disk is not mounted. Where the
parent is gone, too, the nearest remaining ancestor on the same disk decides.
"""

import itertools
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cpsr.checkpoint.memory_states import SHARED_MEMORY

__all__ = ["OWNER_NAME", "Owner", "Verdict", "mark_owner", "owner_of", "owner_path"]

OWNER_NAME = re.compile(r"cpsr-(?P<run_id>[0-9A-Za-z_-]+)-owner")
OWNER_BYTES_MAX = 1 << 14  # several times the longest path
ABOVE_MAX = 64
IDENTITY = "run.json"

# State of the run directory: it is there, it is gone, or this machine cannot know.
Verdict = Literal["there", "gone", "unclear"]

Place = tuple[int, int]  # device and inode number


@dataclass(frozen=True)
class Owner:
    """The run that owns files in shared memory, as recorded when its newest life began.

    Attributes:
        run_id: identity of the run.
        run_dir: its directory, absolute and without links.
        node: the machine, as the job saw it.
        place: device and inode of that directory.
        parent: device and inode of its parent.
        above: those of the ancestors of the parent on the same disk, the nearest first; an older version recorded
            none.
    """

    run_id: str
    run_dir: Path
    node: str
    place: Place
    parent: Place
    above: tuple[Place, ...] = ()

    def look(self) -> tuple[Verdict, str]:
        """Whether the run directory is still there, and why; waits for a file system that hangs.

        It is gone if its parent is here and does not hold the run. The path alone proves nothing. It is gone as well
        if the parent was removed from its own parent, and so on up the same disk.
        """
        try:
            known = _run_id_in(self.run_dir)
            here, parent = _place_of(self.run_dir), _place_of(self.run_dir.parent)
        except OSError as error:
            return "unclear", f"{self.run_dir} cannot be looked at: {error}"
        if known == self.run_id:
            return "there", f"{self.run_dir} holds it"
        if here == self.place or (parent == self.parent and self._is_entry(here)):
            return "gone", f"{self.run_dir} {'is gone' if here is None else 'holds it no more'}"
        if parent is None and self._is_removed():
            return "gone", f"{self.run_dir} is gone, and the directory that it lay in"
        if parent is None:
            return "unclear", f"{self.run_dir.parent} is not here: not mounted now, or in a container, or removed"
        other = self.run_dir.parent if parent != self.parent else self.run_dir
        return "unclear", f"{other} is another directory than it was: a disk is not mounted now, or in a container"

    def is_beside(self, run_dir: Path) -> bool:
        """Whether its run directory is there and another one than this, as that of which this is a copy.

        One directory has the same inode under each path, also where a mount gives it another device. Waits for a file
        system that hangs.
        """
        try:
            if self.look()[0] != "there":
                return False
            return any(
                (self.run_dir / name).stat().st_ino != (run_dir / name).stat().st_ino for name in (".", IDENTITY)
            )
        except OSError:
            return False

    def _is_removed(self) -> bool:
        """Whether the nearest existing ancestor is the recorded one, with no mount between."""
        if not self._is_entry(None):
            return False
        for directory, recorded in zip(self.run_dir.parent.parents, self.above, strict=False):
            found = _place_of(directory)
            if found is not None:
                return found == recorded and recorded[0] == self.place[0]
        return False

    def _is_entry(self, here: Place | None) -> bool:
        """Whether the directory is, and was, an ordinary entry of its parent, not a mount point."""
        return self.place[0] == self.parent[0] and (here is None or here[0] == self.parent[0])


def owner_path(run_id: str, directory: Path = SHARED_MEMORY) -> Path:
    """The file that names the owner of a run's files."""
    return directory / f"cpsr-{run_id}-owner"


def mark_owner(run_id: str, run_dir: Path, node: str, directory: Path = SHARED_MEMORY) -> None:
    """Record the owner of a run's files, before it has any.

    Args:
        run_id: identity of the run.
        run_dir: its directory, which exists.
        node: name of this machine, for messages.
        directory: where shared memory is mounted.

    Raises:
        OSError: there is no shared memory, or no room in it, or the run directory is gone.
    """
    real = run_dir.resolve()
    place, parent = _place_of(real), _place_of(real.parent)
    above = _above(real.parent, place)
    owner = {"run_dir": str(real), "node": node, "place": place, "parent": parent, "above": above}
    data = json.dumps(owner).encode()
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(owner_path(run_id, directory), flags, 0o600)
    try:
        # One write in place: several ranks may write the same.
        os.pwrite(descriptor, data, 0)
        os.ftruncate(descriptor, len(data))
    finally:
        os.close(descriptor)


def owner_of(run_id: str, directory: Path = SHARED_MEMORY) -> Owner | None:
    """The owner of a run's files; None where an older version has left them, or the record cannot be read."""
    try:
        descriptor = os.open(owner_path(run_id, directory), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        if os.fstat(descriptor).st_uid != os.geteuid():
            return None
        data = file.read(OWNER_BYTES_MAX)
    try:
        found: dict[str, Any] = json.loads(data)
        place, parent = ((int(found[name][0]), int(found[name][1])) for name in ("place", "parent"))
        above = tuple((int(one[0]), int(one[1])) for one in found.get("above", ()))
        return Owner(run_id, Path(str(found["run_dir"])), str(found["node"]), place, parent, above)
    except (ValueError, KeyError, TypeError, IndexError):
        return None


def _place_of(directory: Path) -> Place | None:
    """Device and inode of a directory, None where there is none; another OSError where the file system fails."""
    try:
        found = directory.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _above(parent: Path, place: Place | None) -> list[Place]:
    """The directories above a run directory's parent, up to and with the root of its disk."""
    found = [
        at for directory in itertools.islice(parent.parents, ABOVE_MAX) if (at := _place_of(directory)) is not None
    ]
    return list(itertools.takewhile(lambda at: place is not None and at[0] == place[0], found))


def _run_id_in(run_dir: Path) -> str | None:
    """Identity of the run in a directory; None where there is no run or no directory."""
    try:
        known = json.loads((run_dir / IDENTITY).read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise OSError(f"its {IDENTITY} is damaged ({error})") from error
    if not isinstance(known, dict) or "run_id" not in known:
        raise OSError(f"its {IDENTITY} is damaged")
    return str(known["run_id"])
