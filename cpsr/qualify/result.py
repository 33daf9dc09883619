"""What the ranks of `cpsr qualify` record in the work folder, and the result made of it, as JSON and as a table.

Every line is complete once written, whatever happens to the process; the folder is on a disk that all ranks see.
"""

import json
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cpsr.checkpoint.memory_owners import remove_memory_states
from cpsr.checkpoint.run_directory import IDENTITY
from cpsr.demo.device import device_text
from cpsr.qualify.cells import Cell
from cpsr.tables import print_table

__all__ = ["Records", "cell_name", "clear", "folder_name", "print_result", "read_records", "release_memory"]
__all__ += ["result_of"]

FORMAT = 1  # of the JSON
CELL = ("engine", "zero", "precision", "optimizer", "feature")
WORDS = {"passed": "passed", "failed": "[bold red]FAILED[/]", "not applicable": "-"}


class Records:
    """The file of one rank.

    Args:
        folder: the work folder.
        rank: that writes.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._path, self._rank = folder / f"rank-{rank:05d}.jsonl", rank

    def add(self, event: str, **fields: Any) -> None:
        """Append one line, with the time and this rank."""
        line = json.dumps({"event": event, "rank": self._rank, "unix_seconds": time.time()} | fields)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def began(self, trial: str) -> None:
        """This rank begins a check."""
        self.add("began", trial=trial)

    def ended(self, trial: str, error: str, seconds: float, figures: Mapping[str, Any]) -> None:
        """This rank has ended a check, with an error or without (empty)."""
        self.add("ended", trial=trial, error=error, seconds=seconds, figures=dict(figures))


def read_records(folder: Path) -> list[dict[str, Any]]:
    """All lines of all ranks, by time; a line that is being written is left out."""
    found = [line for path in sorted(folder.glob("rank-*.jsonl")) for line in _lines(path)]
    return sorted(found, key=lambda line: float(line["unix_seconds"]))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for text in path.read_text(encoding="utf-8").split("\n")[:-1]:  # what follows the last newline is incomplete
        yield json.loads(text)


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


def release_memory(folder: Path, spared: Collection[str] = ()) -> None:
    """Free this machine's shared memory of the checks in a work folder, but for those in folders of these names."""
    for identity in folder.glob(f"*/run/{IDENTITY}"):
        if identity.parts[-3] not in spared:
            remove_memory_states(json.loads(identity.read_text(encoding="utf-8"))["run_id"])


def result_of(
    lines: Sequence[Mapping[str, Any]], machine: Mapping[str, Any], versions: Mapping[str, str], log: str
) -> dict[str, Any]:
    """Put the ranks' records together, as plain data.

    Args:
        lines: of all ranks, by time.
        machine: processor, cores, memory and device, as plain data.
        versions: of the packages that matter.
        log: path of the ranks' output, or where to find it.

    Returns:
        `checks` has every place of the table: its cell, `check`, `status` (`passed`, `failed` or `not applicable`),
        `reason` why it failed or does not apply, `seconds` of the slowest rank over all lives, and `figures` of rank 0.
    """
    planned: Mapping[str, Any] = next((line for line in lines if line["event"] == "planned"), {})
    checks = [_place(one, lines, planned["ranks"]) for one in planned.get("trials", ())]
    times = [float(line["unix_seconds"]) for line in lines] or [0.0]
    statuses = {one["status"] for one in checks}
    return {
        "format": FORMAT,
        "passed": "passed" in statuses and "failed" not in statuses,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": dict(machine),
        "versions": dict(versions),
        "ranks": planned.get("ranks", 0),
        "backend": planned.get("backend", ""),
        "log": log,
        "seconds": times[-1] - times[0],
        "checks": checks,
    }


def _place(place: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], ranks: int) -> dict[str, Any]:
    """A check passed where every rank has ended it without an error."""
    found = {**place["cell"], "check": place["check"]}
    if place["reason"]:
        return found | {"status": "not applicable", "reason": place["reason"], "seconds": 0.0, "figures": {}}
    mine = [line for line in lines if line.get("trial") == place["trial"]]
    ended = [line for line in mine if line["event"] == "ended"]
    reason = next((line["error"] for line in ended if line["error"]), "")
    if not reason and len({line["rank"] for line in ended}) < ranks:
        reason = "the job ended in this check" if mine else "the job ended before this check"
    times = [line["unix_seconds"] for line in mine] or [0.0]
    figures: Mapping[str, Any] = next((line["figures"] for line in ended if line["rank"] == 0), {})
    status = "failed" if reason else "passed"
    return found | {"status": status, "reason": reason, "seconds": max(times) - min(times), "figures": figures}


def print_result(console: Console, result: Mapping[str, Any], json_path: Path) -> None:
    """Print the table, the figures, and one line for each check that failed."""

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    checks: Sequence[Mapping[str, Any]] = result["checks"]
    print_table(console, _table(result))
    for one in checks:
        if one["status"] == "passed" and (text := _figures_text(one["figures"])):
            say(f"{cell_name(one)}, {one['check']}: {text}")
    failed = [one for one in checks if one["status"] == "failed"]
    for one in failed:
        why = (one["reason"].strip().splitlines() or ["no reason"])[-1]
        say(f"FAILED {cell_name(one)}, {one['check']}: {why} | send us {json_path} and {result['log']}")
    passed = sum(one["status"] == "passed" for one in checks)
    say(f"{passed} checks passed, {len(failed)} failed; {json_path}")


def _table(result: Mapping[str, Any]) -> Table:
    columns = list(dict.fromkeys(one["check"] for one in result["checks"]))
    rows: dict[str, dict[str, str]] = {}
    for one in result["checks"]:
        rows.setdefault(cell_name(one), dict.fromkeys(columns, "-"))[one["check"]] = WORDS[one["status"]]
    machine, versions = result["machine"], [f"{name} {version}" for name, version in result["versions"].items()]
    caption = (
        f"{machine['processor']}, {machine['cores']} cores, {device_text(machine['device'])}; {result['ranks']} ranks "
        f"over {result['backend']}; {', '.join(versions)}; {result['seconds']:.0f} s"
    )
    table = Table("combination", *columns, title="cpsr qualify", caption=caption)
    for cell, words in rows.items():
        table.add_row(cell, *words.values())
    return table


def cell_name(check: Mapping[str, Any]) -> str:
    """The cell of a check in one line."""
    return Cell(**{key: check[key] for key in CELL}).name


def _figures_text(figures: Mapping[str, Any]) -> str:
    """What a reader compares; empty for checks without."""
    if "stall_ratio" in figures:
        stall, step = (
            f"{spread['median']:.2f} ({spread['min']:.2f} to {spread['max']:.2f})"
            for spread in (figures["stall_ratio"], figures["step_ratio"])
        )
        return f"stall {stall} of a copy of {figures['copied_bytes'] / 1e6:.0f} MB, steps {step} of those without CPSR"
    if "guard" in figures:
        return f"{figures['outcome']} ({figures['method']}); guard: {figures['guard']['reason']}"
    return ""
