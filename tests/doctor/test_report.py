"""One line for each finding, whatever the number of machines."""

import json
from dataclasses import replace

from cpsr.doctor.finding import error, ok, warning
from cpsr.doctor.report import as_json, lines

FOUND = [
    replace(ok("fsync", "3 ms"), machine="a"),
    replace(warning("open files", "1024", "raise it"), machine="a"),
    replace(ok("fsync", "4 ms"), machine="b"),
    replace(warning("open files", "1024", "raise it"), machine="b"),
    replace(error("fsync", "it failed", "look at it"), machine="c"),
    replace(warning("open files", "512", "raise it"), machine="c"),
    warning("launcher", "none", "take one"),
]


def test_machines_that_say_the_same_share_a_line() -> None:
    assert [line.split(maxsplit=1)[1].split("  ")[-1].strip() for line in lines(FOUND)][:-1] == [
        "[a and 1 more] 3 ms",
        "[c] it failed: look at it",
        "[a and 1 more] 1024: raise it",
        "[c] 512: raise it",
        "none: take one",
    ]
    assert list(lines(FOUND))[-1] == "2 ok, 4 warnings, 1 error"


def test_one_machine_is_not_named() -> None:
    first, *_, last = lines([one for one in FOUND if one.machine in ("a", "")])
    assert first == "ok       fsync            3 ms"
    assert last == "1 ok, 2 warnings, 0 errors"


def test_programs_get_everything() -> None:
    plain = json.loads(as_json(FOUND, {"ranks": 6}))
    assert (plain["format"], plain["level"], plain["ranks"]) == (1, "error", 6)
    assert [(one["subject"], one["machine"]) for one in plain["findings"]] == [
        (one.subject, one.machine) for one in FOUND
    ]
