"""`cpsr verify <url>` and `cpsr fetch <url> <run directory>`: use of a target without a job."""

from pathlib import Path

from cpsr.checkpoint.catalogue import scan as scan_local
from cpsr.checkpoint.files import make_directory
from cpsr.checkpoint.remote.catalogue import Catalogue, Copy, CopyDamagedError, scan, verify
from cpsr.checkpoint.remote.download import fetch_ranks, prepare_fetch, put_in_place
from cpsr.checkpoint.remote.identity import Identity, read_identity, write_identity
from cpsr.checkpoint.remote.place import Place, open_place
from cpsr.checkpoint.store import CheckpointStore
from cpsr.errors import RecoveryError, RunMismatchError, SaveError

__all__ = ["run_fetch", "run_verify"]


def run_verify(url: str) -> list[str]:
    """Everything that is wrong with the committed copies at a target, one line each; reads all of their bytes.

    Raises:
        CPSRError: the target cannot be read, or nothing was ever committed there.
    """
    place = open_place(url)
    if not scan(place).has_committed:
        raise RunMismatchError(f"nothing is committed at {place.shown}; name what a run has as checkpoint.target")
    return verify(place)


def run_fetch(url: str, run_dir: Path, iteration: int | None) -> list[str]:
    """Fetch a copy of all ranks into a run directory in which no job is running.

    Args:
        url: the target.
        run_dir: the run's own directory, or a new one.
        iteration: which copy; None is the newest whole one.

    Returns:
        What was done, one line each.

    Raises:
        CPSRError: the target cannot be read, is another run's, or has no such whole copy; or the disk failed.
    """
    place = open_place(url, run_dir)
    try:
        known = read_identity(run_dir)
        found = scan(place, None if known is None else known.run_id)
        return _fetch_newest(place, found, run_dir, known, iteration)
    except (OSError, ValueError) as error:
        raise SaveError(f"{run_dir} could not be filled ({error}); what was fetched whole is used next time") from error


def _fetch_newest(
    place: Place, found: Catalogue, run_dir: Path, known: Identity | None, iteration: int | None
) -> list[str]:
    problems = list(found.damaged.values())
    for copy in reversed(found.copies):
        if iteration not in (None, copy.manifest.iteration):
            continue
        store = CheckpointStore(run_dir, 0, copy.manifest.world_size, copy.manifest.run_id, 0)
        kept = [info for info in scan_local(store.directory).checkpoints if info.full]
        if iteration is None and any(info.sequence >= copy.manifest.sequence for info in kept):
            return [*problems, f"{run_dir} holds what is as new as {place.name(copy.folder)}; nothing was fetched"]
        try:
            _fetch(place, copy, run_dir, store, known)
        except CopyDamagedError as error:
            problems.append(str(error))
            continue
        return [*problems, f"checkpoint {copy.manifest.iteration} of {place.shown} is in {run_dir}"]
    wanted = "a copy that is whole" if iteration is None else f"a whole copy of iteration {iteration}"
    raise RecoveryError(f"{place.shown} does not hold {wanted}: {'; '.join(problems) or 'nothing else is wrong there'}")


def _fetch(place: Place, copy: Copy, run_dir: Path, store: CheckpointStore, known: Identity | None) -> None:
    make_directory(run_dir, fsync=True)
    prepare_fetch(run_dir, copy)
    fetch_ranks(place, copy, copy.manifest.ranks, run_dir)
    if known is None:
        write_identity(run_dir, copy.identity)
    put_in_place(copy, run_dir, store, f"a whole copy was fetched from {place.shown}")
