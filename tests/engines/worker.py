"""One rank of a conformance job: carries out a group of cases as `cpsr qualify` carries out its checks."""

from functools import partial
from pathlib import Path

from cpsr.qualify.cells import Cell, Scene
from cpsr.qualify.checks import Check, Trial
from cpsr.qualify.ranks import Rank, leave
from tests.device import DEVICE
from tests.engines.deepspeed_cases import Case
from tests.engines.groups import GROUPS, LACKING, SLOW

DEADLINE_SECONDS, SLOW_SECONDS = 200.0, 600.0  # of a case; the slow ones build kernels
TOGETHER = Cell("ddp", None, "fp32")  # each case makes its own job


def main(group: str, folder: Path) -> None:
    seconds = SLOW_SECONDS if group in SLOW else DEADLINE_SECONDS
    cases = {name: case for name, case in GROUPS[group].items() if name not in LACKING}
    trials = [
        Trial(Check(name, partial(carry_out, case), deadline_seconds=seconds), TOGETHER) for name, case in cases.items()
    ]
    Rank(folder, DEVICE, f"file://{folder / 'meeting'}").run(trials)
    leave(0)


def carry_out(case: Case, cell: Cell, scene: Scene) -> None:
    case()
