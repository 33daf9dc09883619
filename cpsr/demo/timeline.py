"""From the kill to the first new step: how long each part of the way took, and which parts are CPSR's."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cpsr.demo.notes import EVALUATED, FRAMEWORKS, JOB, OPENED, PRODUCT, STARTED, STEPPED
from cpsr.journal import RecoveryRow

__all__ = ["OURS_AIM_SECONDS", "RESTART_AIM_SECONDS", "Part", "Restart", "restart"]

RESTART_AIM_SECONDS = 10.0
OURS_AIM_SECONDS = 2.0


@dataclass(frozen=True)
class Part:
    """One part of the way.

    Attributes:
        name: for people.
        seconds: how long it took.
        ours: whether it is CPSR's work, and not the launcher's, the framework's or the job's.
    """

    name: str
    seconds: float
    ours: bool = False


@dataclass(frozen=True)
class Restart:
    """The way from the kill to the first finished step of the new processes, in parts that follow each other."""

    parts: Sequence[Part]

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(part.seconds for part in self.parts)

    @property
    def ours_seconds(self) -> float:
        """What is CPSR's."""
        return sum(part.seconds for part in self.parts if part.ours)

    @property
    def aims(self) -> dict[str, bool]:
        """Each aim and whether it is met."""
        return {
            f"below {RESTART_AIM_SECONDS:.0f} s": self.seconds < RESTART_AIM_SECONDS,
            f"CPSR's own below {OURS_AIM_SECONDS:.0f} s": self.ours_seconds < OURS_AIM_SECONDS,
        }


def restart(kill: float, left: float | None, reached: Mapping[str, float], recovery: RecoveryRow) -> Restart:
    """Put together what the launcher, the journal and the processes noted.

    Args:
        kill: when the signal was sent, in Unix seconds, as all that follow.
        left: when the failed life ended, if anybody was left to note it.
        reached: when the last new process had reached what (`read_notes`).
        recovery: how the new life began.
    """
    return Restart(tuple(_parts(kill, left, reached, recovery)))


def _parts(kill: float, left: float | None, reached: Mapping[str, float], recovery: RecoveryRow) -> Iterator[Part]:
    if left is None:  # rank 0 keeps the journal: where it was killed, nobody noted the end
        yield Part("noticed, processes started anew", reached[STARTED] - kill)
    else:
        # What its framework takes to notice is a small part: it is counted as ours, since closing is.
        yield Part("the other rank notices, closes the run", left - kill, ours=True)
        yield Part("it exits, processes are started anew", reached[STARTED] - left)
    yield Part("imports of torch and DeepSpeed", reached[FRAMEWORKS] - reached[STARTED])
    yield Part("imports of CPSR", reached[PRODUCT] - reached[FRAMEWORKS], ours=True)
    yield Part("process group, engine, data", reached[JOB] - reached[PRODUCT])
    load, predict, inject = (
        seconds or 0.0 for seconds in (recovery.load_seconds, recovery.predict_seconds, recovery.inject_seconds)
    )
    yield Part("opening the run", reached[OPENED] - reached[JOB] - load - predict - inject, ours=True)
    yield Part("load", load, ours=True)
    yield Part("predict", predict, ours=True)
    yield Part("inject", inject, ours=True)
    yield Part("the demo's own evaluation", reached[EVALUATED] - reached[OPENED])
    yield Part("first step", reached[STEPPED] - reached[EVALUATED])
