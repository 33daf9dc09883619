"""Live jobs with windows of sparse snapshots, which are killed in every phase of a replay."""

from cpsr.benchmarks.faults.part import RANKS, Fault
from cpsr.benchmarks.faults.scenarios import Memory, Mode, Scenario, at_moment, in_step

__all__ = ["REPLAYED"]

WINDOW = 4
# Windows begin with iterations 1, 5, 9, 13, 17: the last one before the failure goes from 17 to 20. The checkpoint is
# older than the window before that.
FAILURE, FIRST, LAST, INTERVAL = 23, 17, 20, 12
_BOTH = tuple(range(RANKS))
_LOST = in_step("SIGKILL", (1,), FAILURE)


def _replay(
    name: str,
    *again: tuple[Fault, ...],
    first: tuple[Fault, ...] = _LOST,
    mode: Mode = "exact",
    memory: Memory = "kept",
) -> Scenario:
    """A failure, and more of them in the lives that replay."""
    return Scenario(
        f"replay: {name}",
        mode,
        1,
        (first, *again),
        memory=memory,
        interval_iterations=INTERVAL,
        window_iterations=WINDOW,
    )


REPLAYED = (
    _replay("one killed"),
    _replay("both killed", first=in_step("SIGKILL", _BOTH, FAILURE)),
    _replay("killed as a window is loaded", at_moment("load of a window", "SIGKILL", 0, 1)),
    _replay("killed before the first repeated step", in_step("SIGKILL", (0,), FIRST)),
    _replay("killed in a repeated step", in_step("SIGKILL", (1,), FIRST + 1, 0.004)),
    _replay("killed between repeated steps", in_step("SIGKILL", (0,), FIRST + 1)),
    _replay("killed as a window is put back", at_moment("conversion", "SIGKILL", 1, 2)),
    _replay("killed as weights are compared", at_moment("comparison", "SIGKILL", 0, 2)),
    _replay("killed before the last repeated step", in_step("SIGKILL", (1,), LAST - 1)),
    _replay("killed as the last part is put back", at_moment("conversion", "SIGKILL", 0, LAST - FIRST)),
    _replay("killed right after", in_step("SIGKILL", (0,), LAST)),
    _replay("killed before the next window is whole", in_step("SIGKILL", (1,), LAST + 2)),
    _replay(
        "killed in three replays",
        in_step("SIGKILL", (0,), FIRST + 1),
        in_step("SIGKILL", _BOTH, LAST - 1),
        in_step("SIGKILL", (1,), FIRST),
    ),
    _replay("both killed in a replay", in_step("SIGKILL", _BOTH, FIRST + 2)),
    _replay("the newest window damaged", memory="newest damaged"),
    _replay("the newest window missing", memory="newest removed"),
    _replay("every window of a rank damaged", memory="damaged"),
    _replay("every window missing", memory="removed"),
    _replay("the plan chooses", in_step("SIGKILL", (0,), FAILURE + 2), mode="auto"),
)
"""All of them end bit for bit as the job that was left alone, but for the last, which may predict."""
