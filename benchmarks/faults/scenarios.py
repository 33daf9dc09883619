"""What happens to a live job: which signal reaches which rank at which moment, and what is done to its memory."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from cpsr.benchmarks.faults.moments import PREDICTING, REPLICATING, RESTARTING, TRAINING
from cpsr.benchmarks.faults.part import RANKS, Fault

__all__ = ["FIXED", "MOMENTS", "NEVER_SENT", "REPLAYED", "Scenario", "chosen", "draw"]

Mode = Literal["exact", "auto", "predict"]
Memory = Literal["kept", "damaged", "removed", "newest damaged", "newest removed"]

INTERVAL = 4
ITERATIONS = 30
FAILURE = 23  # three steps after a checkpoint, with enough of them before it to predict from
STEP_SECONDS = 0.02  # about what a step of the job takes, so that a delay below it ends inside
WEIGHTS = {"SIGKILL": 3, "SIGSEGV": 1, "SIGSTOP": 1, "SIGTERM": 1}
MOMENTS = TRAINING | RESTARTING | PREDICTING | REPLICATING
MODES: tuple[Mode, ...] = ("exact", "auto", "predict")

NEVER_SENT = {
    "SIGSTOP of all ranks": "nobody is left to notice; only the launcher could",
    "SIGSTOP before the first heartbeat": "a rank is watched from its first beat on; before, the process group's own "
    "timeout ends the wait",
    "loss of a real machine": "there is one; each rank has a directory for its memory, which is removed",
}


@dataclass(frozen=True)
class Scenario:
    """One job from its start to its end, whatever happens in between.

    Attributes:
        name: for the report.
        mode: CPSR's.
        zero: stage.
        lives: what happens in each life; after the last of them the job is left alone.
        shared_memory: whether snapshots outlive the processes.
        memory: what is done to it after the first life: `damaged` is one bit of every state of rank 1, or of its
            newest one.
        poison: a predicted state is trained on targets that make it diverge.
        asked: SIGTERM to all ranks once the first fault has happened, as a launcher sends it that is stopped.
        nodes: each rank is a machine of its own, with replicas on the other. The memory that is `removed` is then that
            of the machine of rank 1.
        continued: the rank that was stopped goes on when the next life has begun.
        iterations, interval_iterations: of the job and its checkpoints.
        window_iterations: of sparse snapshots, which a restart replays; None: whole ones.
    """

    name: str
    mode: Mode
    zero: int
    lives: tuple[tuple[Fault, ...], ...]
    shared_memory: bool = True
    memory: Memory = "kept"
    poison: bool = False
    asked: bool = False
    continued: bool = False
    nodes: bool = False
    iterations: int = ITERATIONS
    interval_iterations: int = INTERVAL
    window_iterations: int | None = None

    @property
    def summary(self) -> str:
        """All of it, in one line."""
        lives = "; ".join(" and ".join(str(fault) for fault in life) for life in self.lives)
        memory = self.memory if self.shared_memory else "off"
        machines = ", each rank a machine" if self.nodes else ""
        windows = "" if self.window_iterations is None else f", windows of {self.window_iterations}"
        return f"{lives} (mode {self.mode}, ZeRO-{self.zero}, memory {memory}{machines}{windows})"


def in_step(signal: str, ranks: Sequence[int], at: int = FAILURE, delay_seconds: float = 0.0) -> tuple[Fault, ...]:
    """A signal in or before the step after an iteration."""
    return (Fault("step", signal, tuple(ranks), at, delay_seconds),)


def at_moment(moment: str, signal: str, rank: int, at: int) -> tuple[Fault, ...]:
    """A signal at another moment; see `moments`."""
    return (Fault(moment, signal, (rank,), at),)


_LOST = in_step("SIGKILL", (1,))
_BOTH = range(RANKS)

FIXED = (
    Scenario("two in a row, exact", "exact", 1, (in_step("SIGKILL", (1,), 14), in_step("SIGKILL", (0,), 15))),
    Scenario("two in a row, predict", "predict", 1, (_LOST, in_step("SIGKILL", (0,), 25))),
    Scenario("before any checkpoint", "auto", 2, (in_step("SIGKILL", (0,), 2),)),
    Scenario(
        "twice while recovering",
        "predict",
        2,
        (_LOST, at_moment("load", "SIGKILL", 0, 1), at_moment("judging", "SIGKILL", 1, 1)),
    ),
    Scenario("all killed, exact", "exact", 3, (in_step("SIGKILL", _BOTH),)),
    Scenario("all killed, predict", "predict", 3, (in_step("SIGKILL", _BOTH),)),
    Scenario("stopped, goes on late", "exact", 1, (in_step("SIGSTOP", (1,), 14),), continued=True),
    Scenario("segmentation fault", "auto", 1, (in_step("SIGSEGV", (0,), 22, 0.004),)),
    Scenario("one asked to leave", "predict", 1, (in_step("SIGTERM", (1,), 21),)),
    Scenario("all asked to leave", "exact", 2, (in_step("SIGTERM", _BOTH, 22),)),
    Scenario("asked while a step hangs", "predict", 1, (in_step("hang", (1,)),), asked=True),
    Scenario("one killed, its memory damaged", "exact", 1, (at_moment("commit", "SIGKILL", 0, 20),), memory="damaged"),
    Scenario("one killed, all memory gone", "predict", 1, (_LOST,), memory="removed"),
    Scenario("one killed, all ranks alike", "predict", 0, (_LOST,)),
    Scenario("one killed, writes shared out", "predict", 0, (_LOST,), memory="removed"),
    Scenario(
        "killed in a commit, writes shared out",
        "exact",
        0,
        (at_moment("commit", "SIGKILL", 0, 20),),
        memory="removed",
    ),
    Scenario("killed while the other dumps", "predict", 1, ((*_LOST, Fault("dump", "SIGKILL", (0,), 1)),)),
    Scenario(
        "a machine lost with its memory",
        "exact",
        1,
        (at_moment("commit", "SIGKILL", 0, 20),),
        memory="removed",
        nodes=True,
    ),
    Scenario(
        "a machine lost, all ranks alike",
        "exact",
        0,
        (at_moment("commit", "SIGKILL", 0, 20),),
        memory="removed",
        nodes=True,
    ),
    Scenario("rolled back", "predict", 1, (in_step("SIGKILL", _BOTH),), shared_memory=False, poison=True),
)


# Jobs with windows of sparse snapshots, which begin with iterations 1, 5, 9, 13, 17: the last one before the failure
# goes from 17 to 20. The checkpoint is older than the window before that.
WINDOW = 4
FIRST, LAST, RARE_INTERVAL = 17, 20, 12


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
        interval_iterations=RARE_INTERVAL,
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


def chosen(seed: int) -> list[Scenario]:
    """The fixed scenarios, and one drawn for every moment."""
    return [*FIXED, *draw(seed, len(MOMENTS))]


def draw(seed: int, count: int) -> Iterator[Scenario]:
    """So many scenarios, the same for the same seed; each moment comes once before any comes again."""
    chance = random.Random(seed)  # noqa: S311 - nothing secret is drawn
    waiting: list[str] = []
    for number in range(count):
        if not waiting:
            waiting = list(MOMENTS)
            chance.shuffle(waiting)
        yield _drawn(chance, waiting.pop(), number)


def _drawn(chance: random.Random, moment: str, number: int) -> Scenario:
    happening = MOMENTS[moment]
    signals = [name for name in WEIGHTS if name != "SIGSTOP" or happening.watched]
    signal = chance.choices(signals, [WEIGHTS[name] for name in signals])[0]
    ranks: tuple[int, ...] = (chance.choice(happening.ranks),)
    if moment == "step" and signal != "SIGSTOP" and chance.random() < 1 / 2:
        ranks = tuple(range(RANKS))
    delay_seconds = chance.uniform(0, STEP_SECONDS) if moment == "step" else 0.0
    fault = Fault(moment, signal, ranks, chance.choice(happening.places), delay_seconds)
    mode: Mode = "predict" if moment in PREDICTING else chance.choice(MODES)
    lost = in_step("SIGKILL", chance.choice(((0,), (1,), _BOTH)), chance.randint(21, 23))
    first = (lost,) if moment in RESTARTING or moment in PREDICTING else ()
    return Scenario(
        f"drawn {number}: {moment}",
        mode,
        chance.randint(1 if moment in PREDICTING else 0, 3),  # where all hold the same a survivor serves all
        (*first, (fault,)),
        shared_memory=moment in ("sealing", "decision") or moment in REPLICATING or chance.random() < 2 / 3,
        nodes=moment in REPLICATING,
        poison=moment in ("roll-back", "setting aside"),
    )
