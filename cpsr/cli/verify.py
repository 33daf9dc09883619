"""`cpsr verify`: every committed file of a run directory, or of a target, read and compared."""

from pathlib import Path

import typer

from cpsr.checkpoint.remote.copies import verify
from cpsr.checkpoint.remote.place import open_place
from cpsr.checkpoint.verify import verify_run
from cpsr.errors import RunMismatchError

__all__ = ["is_whole"]

RUN_FILES = ("run.json", "journal.db", "checkpoints")  # any of them shows that a directory is a run's


def is_whole(location: str) -> bool:
    """Whether every committed file is; prints a line for each that is not.

    Args:
        location: a run directory, or the URL of a target.

    Raises:
        RunMismatchError: it is neither.
        CPSRError: the target cannot be read.
    """
    return _is_target_whole(location) if "://" in location else _is_run_whole(Path(location))


def _is_target_whole(url: str) -> bool:
    damages = verify(open_place(url))
    for damage in damages:
        typer.echo(damage)
    if damages:
        typer.echo(f"{len(damages)} damaged files; recovery takes another copy", err=True)
    else:
        typer.echo("every committed copy is whole")
    return not damages


def _is_run_whole(directory: Path) -> bool:
    if not any((directory / name).exists() for name in RUN_FILES):
        raise RunMismatchError(
            f"{directory} is no run directory: it holds none of {', '.join(RUN_FILES)}; name the one that the "
            "training was given as run_dir"
        )
    problems = verify_run(directory)
    for problem in problems:
        where = "" if problem.iteration is None else f" (iteration {problem.iteration})"
        typer.echo(f"{problem.file}: {problem.what}{where}")
    if problems:
        typer.echo(f"{directory}: {len(problems)} damaged files; recovery skips their checkpoints", err=True)
    else:
        typer.echo(f"{directory}: every committed checkpoint is whole")
    return not problems
