"""The findings of all machines, for people and for programs."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from cpsr.doctor.finding import Finding, Level, worst

__all__ = ["as_json", "lines"]

FORMAT = 1  # of the JSON
_LEVEL_WIDTH, _SUBJECT_WIDTH = 9, 17


def lines(findings: Sequence[Finding]) -> Iterator[str]:
    """One line for each finding, then one that counts them.

    Machines about which a check says the same share a line. So do those without a problem, whose figures differ: the
    line has the first one's.
    """
    groups: dict[tuple[str, Level, str], list[Finding]] = defaultdict(list)
    for one in findings:
        groups[one.subject, one.level, "" if one.level == "ok" else one.sentence].append(one)
    order = {subject: place for place, subject in enumerate(dict.fromkeys(one.subject for one in findings))}
    machines = {one.machine for one in findings if one.machine}
    for (subject, level, _), alike in sorted(groups.items(), key=lambda item: order[item[0][0]]):
        where = _where([one.machine for one in alike]) if len(machines) > 1 and alike[0].machine else ""
        yield f"{level:{_LEVEL_WIDTH}}{subject:{_SUBJECT_WIDTH}}{where}{' '.join(alike[0].sentence.split())}"
    counts = {level: sum(one.level == level for one in findings) for level in _NAMES}
    yield ", ".join(f"{count} {_NAMES[level][count != 1]}" for level, count in counts.items())


def as_json(findings: Sequence[Finding], about: dict[str, Any]) -> str:
    """One object: what it is about, the worst level, and every finding of every machine.

    Args:
        findings: of all machines.
        about: more keys, for the job.
    """
    plain = [one.to_json() for one in findings]
    return json.dumps({"format": FORMAT, "level": worst(findings), **about, "findings": plain})


# For one, and for another number.
_NAMES: dict[Level, tuple[str, str]] = {
    "ok": ("ok", "ok"),
    "warning": ("warning", "warnings"),
    "error": ("error", "errors"),
}


def _where(machines: Sequence[str]) -> str:
    return f"[{machines[0]}] " if len(machines) == 1 else f"[{machines[0]} and {len(machines) - 1} more] "
