"""The result of `cpsr qualify` for people: tables on a terminal, and the page docs/compatibility.md.

`python -m cpsr.qualify.report FILE.json` prints the page of a result.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cpsr.demo.device import CPU, device_text
from cpsr.qualify.result import CheckResult, Qualification
from cpsr.tables import print_table

__all__ = ["page", "print_result"]

WORDS = {"passed": "passed", "failed": "FAILED", "not applicable": "-"}
PREAMBLE = """# Compatibility

What `cpsr qualify` found, and on which machine. It trains small models with every engine, ZeRO stage, precision and
optimizer that the machine has, and checks per combination:

- **restart**: a snapshot, injected into another engine, continues bit for bit like what never stopped;
- **side group**: CPSR's collectives, and messages to neighbours, travel beside the collectives of the training;
- **speed**: the stall of a snapshot over a copy of the same bytes, pinned on CUDA, and 20 steps with one checkpoint
  over 20 without CPSR. The stall may be shorter than the copy: the rest of it runs beside the next forward. Where the
  ranks keep every core busy, the writes take part of their time;
- **memory**, **disk**: a rank kills itself with SIGKILL; after the restart from shared memory, or from the disk, all
  losses are those of the uninterrupted run bit for bit;
- **dump**: one rank dies, and the restart takes the state of the others at the failure;
- **predict**: the memory is lost, and the restart predicts the state under the guard, with the right labels.

The checks with processes that are killed run for representative combinations.
"""
NO_GPU = "No GPU has run these checks yet.\n"


def print_result(console: Console, result: Qualification, json_path: Path) -> None:
    """Print the table, the figures, and one line for each check that failed."""
    print_table(console, _table(result))
    for one in result.checks:
        if one.status == "passed" and (text := _figures(one)):
            console.print(f"{one.cell}, {one.check}: {text}", highlight=False, soft_wrap=True)
    for one in result.failed:
        why = (one.reason.strip().splitlines() or ["no reason"])[-1]
        console.print(
            f"FAILED {one.cell}, {one.check}: {why} | send us {json_path} and {result.log}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    count = sum(one.status == "passed" for one in result.checks)
    console.print(f"{count} checks passed, {len(result.failed)} failed; {json_path}", highlight=False, soft_wrap=True)


def page(result: Qualification) -> str:
    """The text of docs/compatibility.md."""
    checks = _columns(result)
    lines = ["| combination | " + " | ".join(checks) + " |", "|---|" + "---|" * len(checks)]
    lines += [f"| {cell} | " + " | ".join(words[check] for check in checks) + " |" for cell, words in _rows(result)]
    notes = [f"- {one.cell}, {one.check}: {text}" for one in result.checks if (text := _figures(one))]
    device = NO_GPU if result.machine["device"]["kind"] == CPU else ""
    return (
        f"{PREAMBLE}\n{device}\n## {result.date[:10]}: {_machine_text(result)}\n\n"
        + "\n".join(lines)
        + "\n\nA dash: not run, for the reason in the JSON.\n\n## Figures\n\n"
        + "\n".join(notes)
        + "\n"
    )


def _machine_text(result: Qualification) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    machine = result.machine
    return (
        f"{machine['processor']}, {machine['cores']} cores, {device_text(machine['device'])}; "
        f"{result.ranks} ranks over {result.backend}; {versions}; {result.seconds:.0f} s"
    )


def _columns(result: Qualification) -> list[str]:
    return list(dict.fromkeys(one.check for one in result.checks))


def _rows(result: Qualification) -> Iterator[tuple[str, Mapping[str, str]]]:
    rows: dict[str, dict[str, str]] = {}
    for one in result.checks:
        rows.setdefault(one.cell, dict.fromkeys(_columns(result), "-"))[one.check] = WORDS[one.status]
    yield from rows.items()


def _table(result: Qualification) -> Table:
    table = Table("combination", *_columns(result), title="cpsr qualify", caption=_machine_text(result))
    for cell, words in _rows(result):
        table.add_row(cell, *(f"[bold red]{word}[/]" if word == "FAILED" else word for word in words.values()))
    return table


def _figures(one: CheckResult) -> str:
    """What a reader compares; empty for checks without."""
    figures: Mapping[str, Any] = one.figures
    if "stall_ratio" in figures:
        return (
            f"stall {_ratio(figures['stall_ratio'])} of a copy of {figures['copied_bytes'] / 1e6:.0f} MB, "
            f"steps {_ratio(figures['step_ratio'])} of those without CPSR"
        )
    if "guard" in figures:
        return f"{figures['outcome']} ({figures['method']}); guard: {figures['guard']['reason']}"
    return ""


def _ratio(spread: Mapping[str, float]) -> str:
    return f"{spread['median']:.2f} ({spread['min']:.2f} to {spread['max']:.2f})"


if __name__ == "__main__":
    sys.stdout.write(page(Qualification.from_json(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
