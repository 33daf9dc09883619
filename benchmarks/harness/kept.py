"""What finished pieces of a long measurement found, kept so that an interrupted one goes on with those missing."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cpsr.benchmarks.harness.files import read_json, write_json

__all__ = ["kept"]

# Of the machine's description: what decides over the bits of a training.
_DECISIVE = ("code", "cpu_model", "cores", "python", "versions")


def kept(cache: Path, task: Any, machine: Mapping[str, Any], measure: Callable[[], Any]) -> Any:
    """What a task found, measured now where this very code on this machine has not measured it yet.

    Code whose commit is not known, or that differs from it, is measured every time: nobody would know what it was.

    Args:
        cache: a directory, made where it is missing.
        task: plain data that describes it; nothing in it is timed.
        machine: see `describe_machine`.
        measure: does it; its result is plain data with finite numbers.

    Raises:
        CPSRError: a kept file is damaged.
    """
    code = machine["code"]
    if code is None or code.endswith("+"):
        return measure()
    identity = {"task": task, **{key: machine[key] for key in _DECISIVE}}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    path = cache / f"{digest[:32]}.json"
    before = read_json(path)
    if before is not None:
        return before["found"]
    found = measure()
    write_json(path, {"identity": identity, "found": found})
    return found
