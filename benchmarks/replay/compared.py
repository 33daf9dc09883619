"""Windows, snapshots in memory, rivals with their own policies and stale experts under the same kills.

Each way also trains once without a kill, in turn with an engine without CPSR in the same processes: its overhead.
"""

import json
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from cpsr.benchmarks.harness.intervals import Estimate
from cpsr.benchmarks.harness.measurement import Measurement, interval_text
from cpsr.benchmarks.harness.ranks import start_ranks
from cpsr.benchmarks.replay.in_turn import paired_interval
from cpsr.benchmarks.replay.live_interval import CHECKFREQ, PCCHECK, PROFILED_INTERVAL, PROFILED_ITERATIONS
from cpsr.benchmarks.replay.mixture import ALONE, LIVE, Mixture, Part, found_path, rank_main
from cpsr.checkpoint.memory_owners import remove_memory_states
from cpsr.checkpoint.run_directory import run_id
from cpsr.errors import CPSRError

__all__ = ["EXACT", "MEMORY", "RARELY", "STALE", "WAYS", "WINDOW", "WINDOWS", "Plan", "Run", "compare"]
__all__ += ["lost_tokens"]

RANKS = 2
WINDOW = 4
WINDOWS, MEMORY, STALE = f"windows of {WINDOW}", "snapshots in memory", "stale experts"
CHECKFREQ_LIVE, PCCHECK_LIVE = "CheckFreq, live", "PCcheck, live"

RARELY = {"interval_iterations": 100_000}
_DISK = {"shared_memory": False, "interval_iterations": PROFILED_INTERVAL}
_EXACT = {"mode": "exact", "checkpoint": _DISK}
_PLAIN = {"learning": {"budget_fraction": 0.0}, "ranks": {"heartbeat_timeout_seconds": 30.0}}


@dataclass(frozen=True)
class Way:
    """How a job saves its state.

    Attributes:
        config: of CPSR.
        policy: of `LiveInterval`, which sets the interval; None: that of the configuration stays.
        interval_iterations: of snapshots, where no policy sets it.
    """

    config: Mapping[str, Any]
    policy: str | None = None
    interval_iterations: int = 1


_REPLAY = {"enabled": True, "window_iterations": WINDOW}
# One expert of each layer in a checkpoint, in turn; too few checkpoints are kept to predict from.
_EXPERTS = {"policy": "sequential", "experts_per_layer": 1}
WAYS = {
    WINDOWS: Way({"mode": "exact", "checkpoint": RARELY, "replay": _REPLAY}, interval_iterations=WINDOW),
    MEMORY: Way({"mode": "exact", "checkpoint": RARELY, "memory": {"interval_iterations": 1}}),
    CHECKFREQ_LIVE: Way(_EXACT, CHECKFREQ),
    PCCHECK_LIVE: Way(_EXACT, PCCHECK),
    STALE: Way({"mode": "auto", "checkpoint": _DISK, "experts": _EXPERTS}, CHECKFREQ),
}
EXACT = tuple(name for name in WAYS if name != STALE)
_NOTHING = Way({"mode": "exact", "checkpoint": {**RARELY, "shared_memory": False}})


@dataclass(frozen=True)
class Plan:
    """Size of the comparison.

    Attributes:
        iterations: of each run.
        rounds: in each, every way meets the same kills.
        kills: of both ranks, in each run.
        paired_steps: of each way, that show its overhead.
        mixture: shape of the model.
    """

    iterations: int = 120
    rounds: int = 3
    kills: int = 2
    paired_steps: int = 400
    mixture: Mixture = field(default_factory=Mixture)

    def killed_at(self, round_: int) -> list[int]:
        """Iterations of the kills, drawn in equal parts of the run between its first third and its last sixth."""
        chance = random.Random(round_)  # noqa: S311 - nothing secret is drawn
        first, last = self.iterations // 3, self.iterations * 5 // 6
        length = (last - first) // self.kills
        return [first + place * length + chance.randrange(length) for place in range(self.kills)]


@dataclass(frozen=True)
class Run:
    """What one run came to, all its lives together.

    Attributes:
        repeated: iterations that each failure had repeated.
        lost_tokens: that failures took from experts, over all layers, as far as no later failure undid it.
        down_seconds: of each failure, from the last step before it to the first one's begin after it.
        blocks: seconds of a step without CPSR and with it, in turn, where it was timed.
        profiles: of its policy, oldest first.
        digests: of each rank's state at the end.
        methods: how each life began.
        state_bytes: of rank 0.
    """

    repeated: list[int]
    lost_tokens: float
    down_seconds: list[float]
    blocks: dict[str, list[float]]
    profiles: list[dict[str, Any]]
    digests: list[str]
    methods: list[str]
    state_bytes: int


def compare(call: Measurement, plan: Plan) -> dict[str, Any]:
    """Run everything, print the table, and return plain data.

    Raises:
        CPSRError: a job failed; or what has to be exact is not.
    """
    advance = call.bar("compared runs", 1 + len(WAYS) * (1 + plan.rounds))

    def done(name: str, way: Way, *given: Any) -> Run:
        run = _run(call.directory / f"compared-{name}", way, plan, *given)
        advance()
        return run

    control = done("control", _NOTHING, [])
    found = {}
    for place, (name, way) in enumerate(WAYS.items()):
        timed = done(f"{place}-timed", way, [], plan.paired_steps)
        killed = [done(f"{place}-{number}", way, plan.killed_at(number)) for number in range(plan.rounds)]
        if name in EXACT and any(one.digests != control.digests for one in killed):
            raise CPSRError(f"{name}: a run ended with another state than the one that nothing happened to")
        found[name] = _figures(way, timed, killed, control, plan)
    _show(call, found)
    return {
        "plan": asdict(plan),
        "step_seconds": [seconds for own in found.values() for seconds in own["blocks"][ALONE]],
        "ways": found,
        "state_bytes_of_a_rank": control.state_bytes,
    }


def _run(directory: Path, way: Way, plan: Plan, kills: Sequence[int], paired_steps: int = 0) -> Run:
    """One run with real kills of both ranks, each followed by a restart, or one whose steps are timed in its end."""
    directory.mkdir(parents=True)
    run_dir = directory / "run"
    whole = {**_PLAIN, **way.config, "run_dir": str(run_dir)}
    if paired_steps:
        whole["mode"] = "auto"  # `exact` refuses a loop with another engine
    lives: list[list[list[dict[str, Any]]]] = []
    profile: dict[str, Any] | None = None
    for life, killed_at in enumerate([*kills, None]):
        result = directory / f"life-{life}"
        iterations = PROFILED_ITERATIONS if paired_steps else plan.iterations
        part = Part(whole, result, iterations, killed_at, plan.mixture, way.policy, profile, paired_steps)
        _live(part)
        lives.append([_read(part.result, rank) for rank in range(RANKS)])
        profile = [profile, *_profiles(lives[-1])][-1]
    remove_memory_states(run_id(run_dir))
    return _seen(lives, kills)


def _profiles(life: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [note["profile"] for note in life[0] if "profile" in note]


def _live(part: Part) -> None:
    """Start the ranks and wait for their end."""
    processes = start_ranks(rank_main, part, RANKS)
    for process in processes:
        process.join(300)
        process.kill()
        process.join()
    killed = all(process.exitcode == -9 for process in processes)
    if not (killed if part.killed_at is not None else all(process.exitcode == 0 for process in processes)):
        statuses = [process.exitcode for process in processes]
        said = "".join(part.result.with_suffix(f".{rank}.log").read_text()[-1000:] for rank in range(RANKS))
        raise CPSRError(f"a life ended with {statuses}, and not as it should:\n{said}")


def _read(result: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in found_path(result, rank).read_text().splitlines()]


def _seen(lives: Sequence[Sequence[list[dict[str, Any]]]], kills: Sequence[int]) -> Run:
    """Figures of the ranks' notes, by life and rank."""
    down, tokens, methods = list[float](), list[tuple[int, float]](), list[str]()
    for place, ranks in enumerate(lives):
        start, *steps = zip(*ranks, strict=False)
        methods.append(start[0]["method"])
        blocks: dict[str, list[float]] = next((notes[0]["blocks"] for notes in steps if "blocks" in notes[0]), {})
        steps = [notes for notes in steps if "iteration" in notes[0]]
        times = [max(note["unix_seconds"] for note in notes) for notes in steps]
        took = [after - before for before, after in pairwise(times)]
        layers = (start[0]["lost_tokens"] or {}).get("layers", [])
        tokens.append((start[0]["iteration"], sum(layer["lost_tokens"] for layer in layers)))
        if place:
            before = max(note["unix_seconds"] for notes in lives[place - 1] for note in notes[-1:])
            down.append(times[0] - before - statistics.median(took))
    ends = [notes[-1] for notes in lives[-1]]
    began = [ranks[0][0]["iteration"] for ranks in lives[1:]]
    return Run(
        [killed - start for killed, start in zip(kills, began, strict=True)],
        lost_tokens(tokens),
        down,
        blocks,
        [one for life in lives for one in _profiles(life)],
        [end["digest"] for end in ends],
        methods,
        ends[0]["state_bytes"],
    )


def lost_tokens(lives: Sequence[tuple[int, float]]) -> float:
    """Tokens that the run has lost at its end.

    A life that a later one undoes, since that begins where it began or before, adds none: what it lost is lost again in
    the account of the later one.

    Args:
        lives: of each, the iteration where it began, and the tokens that experts had lost then.
    """
    lasting = [
        tokens for place, (began, tokens) in enumerate(lives) if all(later > began for later, _ in lives[place + 1 :])
    ]
    return math.fsum(lasting)


def _figures(way: Way, timed: Run, killed: Sequence[Run], control: Run, plan: Plan) -> dict[str, Any]:
    routed = plan.iterations * plan.mixture.tokens_per_iteration
    profiles = [one.profiles[-1] for one in (timed, *killed) if one.profiles]
    intervals = [one["interval_iterations"] for one in profiles] or [way.interval_iterations]
    return {
        "intervals_iterations": intervals,
        "persist_seconds": statistics.median(one["persist_seconds"] for one in profiles) if profiles else None,
        "blocks": timed.blocks,
        "step_ratio": asdict(paired_interval(timed.blocks[LIVE], timed.blocks[ALONE])),
        "repeated_iterations": [one.repeated for one in killed],
        "lost_tokens": [one.lost_tokens for one in killed],
        "lost_token_share": [one.lost_tokens / routed for one in killed],
        "down_seconds": [one.down_seconds for one in killed],
        "methods": sorted({method for one in killed for method in one.methods[1:]}),
        "same_bits": [one.digests == control.digests for one in killed],
    }


def _show(call: Measurement, found: Mapping[str, Mapping[str, Any]]) -> None:
    rows = []
    for name, own in found.items():
        repeated = [one for run in own["repeated_iterations"] for one in run]
        down = [one for run in own["down_seconds"] for one in run]
        rows.append(
            (
                name,
                _range(own["intervals_iterations"], 0),
                interval_text(Estimate(**own["step_ratio"]), digits=3),
                f"{statistics.fmean(repeated):.1f} ({_range(repeated, 0)})" if repeated else "-",
                f"{statistics.fmean(own['lost_token_share']):.2%}",
                _range(down) if down else "-",
                "same" if all(own["same_bits"]) else "others",
            )
        )
    rounds = len(found[WINDOWS]["same_bits"])
    headings = ("way", "every", "step", "repeated", "lost tokens", "down s", "bits")
    call.table(f"jobs that are killed, and their steps without a kill ({rounds} rounds)", headings, rows)


def _range(values: Sequence[float], digits: int = 1) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"
