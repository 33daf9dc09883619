"""What only all ranks together can find out: whether run directory, locks, clocks and packages are the same."""

import fcntl
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from cpsr.checkpoint.resources import existing_part
from cpsr.doctor.finding import Finding, error, named, ok, warning
from cpsr.ranks.group import Group

__all__ = ["check_clocks", "check_locks", "check_shared", "check_versions", "clock_rounds"]

_LOOK_SECONDS = 10.0  # a network file system may show another machine's file late
_PAUSE_SECONDS = 0.05
_ROUNDS = 9
_SKEW_SECONDS = 1.0  # ranks that fail together do so within seconds, and the first one is found by its clock
_SHOWN = 8  # paths and problems that a line names


def check_shared(group: Group, folder: Path | None, run_dir: Path) -> Finding:
    """Whether every rank sees what every rank writes in the run directory; a collective.

    Args:
        group: the ranks.
        folder: of the same name on all ranks, in the run directory; None: this rank could not make it.
        run_dir: as this rank was given it.
    """
    subject, given_here = "run directory", run_dir.absolute()
    below = None  # what is not made yet, and the folder lies above; None: this rank cannot look
    with suppress(OSError):
        below = str(given_here.relative_to(existing_part(run_dir)))
    if folder is not None:
        with suppress(OSError):  # then no rank sees it
            (folder / f"token-{group.rank}").write_text(str(group.rank), encoding="utf-8")
    places = group.gather([str(given_here), below])  # every rank has written by then
    seen, seconds = _seen(folder, group.size)
    found = group.gather({"seen": seen, "seconds": seconds})
    all_ranks = list(range(group.size))
    blind = [rank for rank, one in enumerate(found) if one["seen"] != all_ranks]
    blind = blind or [rank for rank, (_, below) in enumerate(places) if below != places[0][1]]
    if not blind:
        late = max(one["seconds"] for one in found)
        return ok(
            subject, f"all {group.size} ranks see each other's files in {run_dir}, within {late:.2g} s", seconds=late
        )
    given = sorted({path for path, _ in places})
    figures = {"blind_ranks": blind, "run_dirs": given}
    text = f"ranks {named(blind)} do not see the files of all ranks"
    text += f"; the ranks were given {' and '.join(given[:_SHOWN])}" if len(given) > 1 else f" in {given[0]}"
    advice = "run_dir must be one directory, on storage that all machines mount"
    return error(subject, text, advice, **figures)


def check_locks(group: Group, folder: Path) -> Finding:
    """Whether a lock of rank 0 holds for the ranks on other machines; a collective, after `check_shared` was ok."""
    descriptor, problem = -1, None
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if group.rank == 0:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error_of_rank:
        problem = str(error_of_rank)
    group.barrier()
    given = problem is None and group.rank != 0 and _is_given(descriptor)
    answers = group.gather({"given": given, "problem": problem})
    group.barrier()  # rank 0 keeps it until all have tried
    if descriptor >= 0:
        os.close(descriptor)
    problems = [f"rank {rank}: {one['problem']}" for rank, one in enumerate(answers) if one["problem"]]
    if problems:
        advice = "the journal needs locks: mount the file system with them (NFS: lockd, or NFS 4)"
        return error("locks", f"none can be taken ({'; '.join(problems[:_SHOWN])})", advice)
    ignored = [rank for rank, one in enumerate(answers) if one["given"]]
    if ignored:
        advice = "readers on those machines may disturb the journal: mount it without nolock or local_lock"
        return warning("locks", f"ranks {named(ignored)} were given a lock that rank 0 holds", advice, ranks=ignored)
    return ok("locks", f"a lock of rank 0 holds for all {group.size} ranks")


def clock_rounds(group: Group) -> list[list[float]]:
    """The clocks of all ranks, each right after a barrier, several times; a collective."""
    rounds = []
    for _ in range(_ROUNDS):
        group.barrier()
        rounds.append(group.gather(time.time()))
    return rounds


def check_clocks(rounds: Sequence[Sequence[float]]) -> Finding:
    """How far the ranks' clocks are apart.

    Args:
        rounds: of `clock_rounds`; the median over them is taken, since a rank may leave a barrier late.
    """
    ranks = range(len(rounds[0]))
    offsets = [statistics.median(one[rank] - one[0] for one in rounds) for rank in ranks]
    apart = max(offsets) - min(offsets)
    first, last = offsets.index(min(offsets)), offsets.index(max(offsets))
    text = f"the clocks of {len(offsets)} ranks are within {1e3 * apart:.3g} ms"
    if apart <= _SKEW_SECONDS:
        return ok("clocks", text, apart_seconds=apart)
    text = f"the clock of rank {last} is {apart:.3g} s ahead of that of rank {first}"
    advice = "the rank that failed first would be found wrong, and object stores refuse requests; synchronise (NTP)"
    return warning("clocks", text, advice, apart_seconds=apart, first_rank=first, last_rank=last)


def check_versions(found: Sequence[Mapping[str, str | None]]) -> Finding:
    """Whether all ranks have the same packages.

    Args:
        found: name -> version of each rank, Python among them.
    """
    differing = [name for name in found[0] if len({one.get(name) for one in found}) > 1]
    if not differing:
        return ok("versions", f"all {len(found)} ranks have the same Python and packages")
    texts = [f"{name}: {_by_version([one.get(name) for one in found])}" for name in differing]
    return error("versions", "; ".join(texts), "install the same on all machines", differing=differing)


def _seen(folder: Path | None, ranks: int) -> tuple[list[int], float]:
    """The ranks whose tokens are there, waiting for all of them for a while, and the seconds until then."""
    began = time.monotonic()
    while True:
        here = [rank for rank in range(ranks) if folder is not None and _token(folder / f"token-{rank}") == str(rank)]
        waited = time.monotonic() - began
        if len(here) == ranks or folder is None or waited > _LOOK_SECONDS:
            return here, waited
        time.sleep(_PAUSE_SECONDS)


def _token(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None


def _is_given(descriptor: int) -> bool:
    """Whether this process was given the lock, too."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _by_version(versions: Sequence[str | None]) -> str:
    kinds = {one: [rank for rank, other in enumerate(versions) if other == one] for one in dict.fromkeys(versions)}
    return ", ".join(f"{one or 'none'} on ranks {named(ranks)}" for one, ranks in kinds.items())
