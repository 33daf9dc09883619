"""The moments in the life of a job at which a rank can be sent a signal.

A moment has a place: the iteration that it belongs to, or which call of its kind in that life.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cpsr.checkpoint.rank_part as part_module
import cpsr.checkpoint.store as store_module
import cpsr.life.opening as opening_module
import cpsr.restart.sources as sources_module
from cpsr.benchmarks.harness.checkpoint_files import is_rest
from cpsr.checkpoint.arena import Arena
from cpsr.checkpoint.copying import CopyEngine
from cpsr.checkpoint.memory import MemoryFile
from cpsr.checkpoint.progress import ProgressCounter
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.checkpoint.store import CheckpointStore
from cpsr.life.life import Life
from cpsr.life.probation import Probation
from cpsr.life.saver import Saver
from cpsr.peers.peer import Peer
from cpsr.predictor.guard import Guard
from cpsr.replay.conversion import Conversion
from cpsr.restart.prediction import StatePrediction
from cpsr.restart.restore import Restorer
from cpsr.restart.sources import MemorySources

BOTH = (0, 1)
FIRST = (1,)
STEPS = tuple(range(13, 28))
CHECKPOINTS = (12, 16, 20, 24)

Due = Callable[[int, Sequence[Any]], bool]


@dataclass(frozen=True)
class Happening:
    """A function whose call is the moment.

    Attributes:
        owner: of the function; None where the training loop itself knows the moment.
        name: of the function.
        places: of which one is drawn.
        due: whether a call, with its arguments, is that of the place; None counts the calls of the life from 1.
        ranks: where it happens.
        after: the signal comes when the call returns, and not before it.
        watched: whether the other ranks watch this one then.
    """

    owner: Any
    name: str
    places: Sequence[int]
    due: Due | None = None
    ranks: Sequence[int] = BOTH
    after: bool = False
    watched: bool = True


def _snapshot_of(place: int, arguments: Sequence[Any]) -> bool:
    _, plan, *_ = arguments  # is for its snapshot, or for a window, which has no iteration
    return bool(getattr(plan.args[0], "iteration", -1) == place)


def _sealed(place: int, arguments: Sequence[Any]) -> bool:
    _, kind, _, iteration, _ = arguments
    return bool(kind == "snapshot" and iteration == place)


def _written(place: int, arguments: Sequence[Any]) -> bool:
    return is_rest(arguments[0], place)


def _committed(place: int, arguments: Sequence[Any]) -> bool:
    return bool(arguments[0].save.iteration == place)


def _second(place: int, arguments: Sequence[Any]) -> bool:
    return bool(arguments[1] == place)


TRAINING = {
    "step": Happening(None, "", STEPS),
    "updating": Happening(Life, "state_changes", STEPS, after=True),
    "publishing": Happening(ProgressCounter, "publish", STEPS, _second),
    "snapshot": Happening(CopyEngine, "_copy_on_host", CHECKPOINTS, _snapshot_of),
    "sealing": Happening(MemoryFile, "prepare", CHECKPOINTS, _sealed),
    "writing": Happening(part_module, "write_tensors", CHECKPOINTS, _written),
    "commit": Happening(store_module, "seal", CHECKPOINTS, _committed, ranks=(0,)),
    "retention": Happening(CheckpointStore, "retain", (3, 4, 5), ranks=(0,)),
    "last save": Happening(Saver, "save_now", FIRST),
}
RESTARTING = {
    "opening": Happening(opening_module, "open_run", FIRST, watched=False),
    "load": Happening(CheckpointStore, "load", FIRST),
    "decision": Happening(MemorySources, "decide", FIRST),
}
PREDICTING = {
    "prediction": Happening(StatePrediction, "attempt", FIRST),
    "judging": Happening(Guard, "veto", FIRST),
    "watch": Happening(Probation, "observe", (1, 2, 3)),
    "roll-back": Happening(Restorer, "roll_back", FIRST, after=True),
    "setting aside": Happening(CheckpointStore, "abandon_after", (2,)),
}
REPLICATING = {
    "sending": Happening(Peer, "put", (2, 3, 4)),
    "receiving": Happening(Arena, "put", (2, 3, 4)),
}
REPLAYING = {
    "load of a window": Happening(sources_module, "load_window", FIRST),
    "conversion": Happening(Conversion, "after_step", (1, 2, 3, 4)),
    "comparison": Happening(Conversion, "require_same", (1, 2, 3, 4)),
}
DEPARTING = {"dump": Happening(SnapshotPool, "dump", FIRST)}


def arm(moment: str, place: int, act: Callable[[], None]) -> None:
    """Have `act` called at that moment, for the rest of this process; moments of the training loop are its own.

    Args:
        moment: its name.
        place: see `Happening`.
        act: sends the signal.
    """
    known = TRAINING | RESTARTING | PREDICTING | REPLICATING | DEPARTING | REPLAYING
    happening = known[moment]
    owner = happening.owner
    if owner is None:
        return
    original, counted = getattr(owner, happening.name), itertools.count(1)

    def watched(*arguments: Any, **named: Any) -> Any:
        due = next(counted) == place if happening.due is None else happening.due(place, arguments)
        if due and not happening.after:
            act()
        result = original(*arguments, **named)
        if due and happening.after:
            act()
        return result

    setattr(owner, happening.name, watched)
