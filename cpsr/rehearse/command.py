"""`cpsr rehearse`: two undisturbed jobs, three that are cut short, and the verdict."""

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cpsr.errors import ConfigError
from cpsr.life.rehearsed_life import Cut, RehearsedJob
from cpsr.ranks.exits import exiting_at_signals
from cpsr.rehearse.jobs import STEPS_MIN, Ran, ends_of_passes, interval_of, plan_cuts, run
from cpsr.rehearse.verdict import Reference, Tried, Verdict, compare, failed, judge, undisturbed

__all__ = ["Rehearsal", "rehearse"]

Launch = Callable[[RehearsedJob, float | None], Ran]

JOBS = 5  # two undisturbed, three cut
HANG_FACTOR, HANG_SECONDS = 10.0, 300.0  # a job that takes so much longer than the first one hangs


def rehearse(arguments: Sequence[str], steps: int, json_path: Path | None, workdir: Path | None) -> int:
    """Rehearse a script, print the verdict, and write it as JSON.

    Args:
        arguments: of `cpsr run`: torchrun's, the script, and its own.
        steps: of each job.
        json_path: where the verdict goes.
        workdir: a disk for the jobs; by default that of temporary files.

    Returns:
        The exit status: 0 if the script comes back; 1 if not, or if it does not reproduce itself; 2 if that could not
        be found out.

    Raises:
        ConfigError: no script is named.
    """
    if not arguments:
        raise ConfigError("name the script: cpsr rehearse [torchrun's arguments] train.py [its arguments]")
    if workdir is not None:
        workdir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="cpsr-rehearse-", dir=workdir))
    rehearsal = Rehearsal(Console(), folder, partial(run, arguments), steps)
    kept = False
    try:
        with exiting_at_signals():
            verdict = rehearsal.verdict()
        kept = verdict.status != 0
    except (KeyboardInterrupt, SystemExit):
        rehearsal.say(f"Interrupted: all jobs have ended, and {folder} is removed. There is no verdict.")
        raise
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
    rehearsal.show(verdict)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(verdict.to_json(), indent=1) + "\n", encoding="utf-8")
    return verdict.status


class Rehearsal:
    """The jobs of one rehearsal, in their order.

    Args:
        console: shows what was found.
        folder: holds the jobs.
        launch: runs a job, for so many seconds at most.
        steps: of each job.
    """

    def __init__(self, console: Console, folder: Path, launch: Launch, steps: int) -> None:
        self._console, self._folder, self._launch, self._steps = console, folder, launch, steps
        self._limit_seconds: float | None = None
        columns = TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._jobs = self._progress.add_task("undisturbed", total=JOBS)

    def verdict(self) -> Verdict:
        """Run all jobs; shows on a terminal how many have ended, and which one runs."""
        with self._progress:
            return self._verdict()

    def _verdict(self) -> Verdict:
        self.say(f"Running your script for {self._steps} steps, as it is, in {self._folder}")
        first = self._run("undisturbed", "undisturbed", None, interval_of(self._steps))
        if not first.succeeded or first.iteration < STEPS_MIN:
            self._show_output(first)
            return failed(first)
        self._limit_seconds = HANG_SECONDS + HANG_FACTOR * first.seconds
        self.say(f"  undisturbed: {first.iteration} steps on {_ranks(first.ranks)}")
        second = self._run("undisturbed, again", "again", None, interval_of(self._steps))
        if not second.succeeded:
            self._show_output(second)
            return failed(second)
        reference = undisturbed(first, second)
        self.say(f"  undisturbed, again: {_reproduced(reference)}")
        tried = self._cut(reference, second) if reference.reproduces else []
        return judge(reference, tried)

    def show(self, verdict: Verdict) -> None:
        """Print the verdict."""
        self.say(f"\n{verdict.sentence}.")
        for number, cause in enumerate(verdict.causes, 1):
            self.say(f"  {'Likely causes: ' if number == 1 else '               '}({number}) {cause}")
        if verdict.advice:
            self.say(f"What to change: {verdict.advice}.")
        for one in verdict.unprotected:
            self.say(f"Not protected: {one}.")
        if verdict.status:
            self.say(f"The jobs, with what they printed, are in {self._folder}.")

    def _cut(self, reference: Reference, second: Ran) -> list[Tried]:
        ran, tried = reference.ran, []
        witnesses = ran.witnesses(0)
        ends = ends_of_passes([witnesses[step] for step in sorted(witnesses)])
        for number, planned in enumerate(plan_cuts(ran.iteration, ran.ranks, ends)):
            again = self._run(planned.name, f"cut-{number}", planned.cut, planned.interval_iterations)
            if not again.succeeded:
                self._show_output(again)
                one = Tried(planned, f"the job {again.failure}")
            elif not again.was_cut:
                one = Tried(planned, f"step {planned.cut.iteration} was not reached")
            else:
                one = compare(planned, reference, again, second)
            self.say(f"  {planned.name}: {one.result}")
            tried.append(one)
        if not ends and any(one.batches for one in witnesses.values()):
            self.say(f"  No pass over the data ended within {ran.iteration} steps, so none was cut short at its end")
        return tried

    def _run(self, name: str, folder: str, cut: Cut | None, every: int) -> Ran:
        self._progress.update(self._jobs, description=name)
        ran = self._launch(RehearsedJob(str(self._folder / folder), self._steps, every, cut), self._limit_seconds)
        self._progress.advance(self._jobs)
        return ran

    def _show_output(self, ran: Ran) -> None:
        for line in ran.last_lines:
            self.say(f"    {line}")

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _reproduced(reference: Reference) -> str:
    if reference.varies is None:
        return "equal, bit for bit"
    return "equal but for rounding" if reference.reproduces else "not equal"
