"""`cpsr bench experts`: bytes of snapshots of mixtures beside the papers; shares and updates by a holder, measured."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from cpsr.benchmarks.experts.recomputed import measure_updates
from cpsr.benchmarks.experts.shapes import MOETION_EXPERTS, SPREAD_OF_64, Shape, moetion_shape, pec_shape
from cpsr.benchmarks.harness.measurement import measuring
from cpsr.benchmarks.harness.ranks import run_ranks
from cpsr.engines.moe.operators import Expert, ExpertLayer, ExpertParallel
from cpsr.engines.moe.token_counts import zeros
from cpsr.experts.moetion import Moetion
from cpsr.experts.policies import Budget, Load, LoadAware, Policy, Sequential
from cpsr.experts.sharding import adaptive_sharding
from cpsr.replay.schedule import sparse_window
from cpsr.restart.experts import nearest

__all__ = ["IN_TURN", "POLICIES", "WINDOW", "SnapshotSize", "levels", "main", "rank_bytes", "sizes"]

IN_TURN, BY_LOAD, MOETION, WINDOW = "in turn (PEC)", "by load (PEC)", "MOETION", "MoEvement's window, as many bytes"
POLICIES: Mapping[str, Callable[[Sequence[ExpertLayer]], Policy]] = {
    IN_TURN: Sequential,
    BY_LOAD: LoadAware,
    MOETION: Moetion,
}
"""Name -> makes the policy. Windows lose no token: their bytes are worked out apart."""
# Of the whole state (pec, Fig. 5 (a); moetion, section 7.2: "over 9x").
SAVED_AIMS = {(pec_shape().name, IN_TURN): 0.542, (moetion_shape(MOETION_EXPERTS).name, MOETION): 1 - 1 / 9}
JOBS = ((1, 0), (2, 0), (4, 0), (4, 2))  # ranks of a measured job, and over how many its experts are divided
ROUNDING = 0.0005  # of the papers' figures
GIGABYTE = 1e9


@dataclass(frozen=True)
class SnapshotSize:
    """What one snapshot takes.

    Attributes:
        shape: of the model.
        policy: name.
        experts_per_layer: in a snapshot, on average; None where operators of all kinds take turns.
        snapshot_bytes: over all ranks, without what several hold alike.
        dense_bytes: of the whole state.
        round_snapshots: until everything was saved once; None where nothing promises it.
        fits: False where even the smallest snapshot of its kind takes more than it was to take.
    """

    shape: str
    policy: str
    experts_per_layer: int | None
    snapshot_bytes: float
    dense_bytes: int
    round_snapshots: int | None
    fits: bool = True

    @property
    def saved(self) -> float:
        """How much smaller than the whole state, as a fraction of it."""
        return 1 - self.snapshot_bytes / self.dense_bytes


def main(json_path: Path | None = None, *, full: bool = False) -> None:
    """Compute, print the tables, and write the JSON file; `full` also measures shares and updates."""
    with measuring("experts", json_path) as call:
        found, busiest, lost = sizes(), rank_bytes(), levels()
        call.table(
            "Bytes of a snapshot (arithmetic, on the papers' shapes)",
            ("model", "policy", "K", "GB", "less", "factor", "all within"),
            [_row(size) for size in found],
        )
        less = 1 - busiest["adaptive"] / busiest["every_rank_saves_all"]
        shorter = 1 - busiest["adaptive"] / busiest["equal"]
        call.console.print(
            f"With one expert a layer and parts shared out by what each rank has to save, the busiest of 8 ranks saves "
            f"{less:.1%} less (PEC: 76.9%), and {shorter:.1%} less than with parts shared out by themselves (PEC: "
            "11.7% of the time)."
        )
        call.table(
            "Tokens lost with one of two machines (PEC, Fig. 7; one expert a layer on the disk)",
            ("experts a layer in memory", "lost, over that with one"),
            [(str(count), f"{portion:.2f}") for count, portion in lost.items()],
        )
        updates = measure_updates(call) if full else None
        measured = [_measured(call.directory, *job) for job in JOBS] if full else []
        if measured:
            call.table(
                "A snapshot of the busiest rank: each copies all, and its share",
                ("ranks", "experts over", "MB", "less", "training waits, ms", "at a checkpoint, ms"),
                [_shared_row(row) for row in measured],
            )
        aims = {
            f"{size.shape}, {size.policy}: {aim:.1%} smaller snapshots: {size.saved:.1%}": size.saved >= aim - ROUNDING
            for size in found
            if (aim := SAVED_AIMS.get((size.shape, size.policy))) is not None
        }
        call.judge(aims)
        sized = [asdict(size) for size in found]
        bytes_of = {"sizes": sized, "rank_bytes": busiest, "levels": lost}
        call.leave({"aims": aims, **bytes_of, "shares": measured, "updates": updates})


def _measured(directory: Path, ranks: int, expert_parallel: int) -> dict[str, Any]:
    """A job whose ranks copy all, and one whose ranks share: what each of them found."""
    row: dict[str, Any] = {"ranks": ranks, "expert_parallel": expert_parallel}
    for name, shared in (("all", False), ("share", True)):
        folder = directory / f"{ranks}-{expert_parallel}-{name}"
        folder.mkdir()
        row[name] = run_ranks("experts.shares", folder, ranks, expert_parallel=expert_parallel, shared=shared)
    return row


def _shared_row(row: dict[str, Any]) -> tuple[str, ...]:
    copied, stalls, saves = (
        [max(found.get(key, 0.0) for found in row[name]) for name in ("all", "share")]
        for key in ("copied_bytes", "stall_seconds", "checkpoint_stall_seconds")
    )
    return (
        str(row["ranks"]),
        str(row["expert_parallel"] or ""),
        " to ".join(f"{count / 1e6:.1f}" for count in copied),
        f"{1 - copied[1] / copied[0]:.1%}",
        *(" to ".join(f"{1e3 * seconds:.1f}" for seconds in pair) for pair in (stalls, saves)),
    )


def levels() -> dict[int, float]:
    """Experts a layer in each snapshot in memory -> tokens lost with a machine, over those with one expert.

    As in the paper two machines have four ranks each, every iteration has a checkpoint of one expert a layer, and
    experts take turns. Tokens are spread evenly. The machine that is left has newer experts in memory.
    """
    shape = pec_shape()
    ranks = shape.layers[0].experts
    layers = [replace(layer, expert_parallel=ExpertParallel(ranks)) for layer in shape.layers]
    load, lost = Load(zeros(layers), zeros(layers)), dict[int, float]()
    for count in (1, 2, 4, ranks):
        disk, memory = Sequential(layers), Sequential(layers)
        on_disk, in_memory = dict[Expert, int](), dict[Expert, int]()
        ages = 0
        for at in range(3 * ranks):
            on_disk |= dict.fromkeys(disk.select(at, load, Budget(experts_per_layer=1)), at)
            in_memory |= dict.fromkeys(memory.select(at, load, Budget(experts_per_layer=count)), at)
            if at >= 2 * ranks:
                ages += sum(at - reached for reached in _restored(at, on_disk, in_memory, layers, ranks // 2))
        lost[count] = ages
    return {count: ages / lost[1] for count, ages in lost.items()}


def _restored(
    at: int, on_disk: dict[Expert, int], in_memory: dict[Expert, int], layers: Sequence[ExpertLayer], left: int
) -> list[int]:
    """Iteration of each expert after a restart, of which the first ranks have memory left."""
    held: list[dict[str, int]] = [{} for _ in range(2 * left)]
    there: list[dict[str, list[int]]] = [{} for _ in held]
    for expert, saved in on_disk.items():
        owner, name = layers[expert.layer].owner(expert.index), f"{expert.layer}-{expert.index}"
        held[owner][name] = saved
        if owner < left:
            there[owner][name] = [in_memory[expert]]
    nearer = nearest(at, held, there)
    return [nearer.get(name, saved) for part in held for name, saved in part.items()]


def _row(size: SnapshotSize) -> tuple[str, ...]:
    within = "" if size.round_snapshots is None else f"{size.round_snapshots:,}"
    return (
        size.shape,
        size.policy,
        "" if size.experts_per_layer is None else str(size.experts_per_layer),
        f"{size.snapshot_bytes / GIGABYTE:.1f} of {size.dense_bytes / GIGABYTE:.1f}",
        f"{size.saved:.1%}",
        f"{size.dense_bytes / size.snapshot_bytes:.1f}",
        within if size.fits else "none fits: all weights do not",
    )


def sizes() -> list[SnapshotSize]:
    """PEC's 8-expert model with one expert a layer, and MOETION's 64-expert model with the six popular ones."""
    popular = numpy.asarray(SPREAD_OF_64) / 100
    return [*_of(pec_shape(), numpy.full(8, 1 / 8), 1), *_of(moetion_shape(MOETION_EXPERTS), popular, 6)]


def _of(shape: Shape, shares: NDArray[numpy.float64], count: int) -> list[SnapshotSize]:
    """Every policy on one model, then the window with as many bytes as a snapshot in turn takes."""
    load = Load(tuple(shares for _ in shape.layers), zeros(shape.layers))
    in_round = -(-shape.layers[0].experts // count)
    found = []
    for name, make in POLICIES.items():
        chosen = make(shape.layers).select(0, load, Budget(experts_per_layer=count))
        taken = shape.snapshot_bytes(chosen)
        snapshots = in_round if name == IN_TURN else None
        found.append(SnapshotSize(shape.name, name, count, taken, shape.dense_bytes, snapshots))
    operators = shape.operators()
    # Experts by their tokens, then what every token passes.
    order = sorted(operators, key=lambda one: float(shares[one.index]) if isinstance(one, Expert) else numpy.inf)
    budget = found[0].snapshot_bytes
    active, frozen = zip(*(operators[one] for one in order), strict=True)
    turns, largest = sparse_window(active, frozen, budget)
    return [*found, SnapshotSize(shape.name, WINDOW, None, largest, shape.dense_bytes, len(turns), largest <= budget)]


def rank_bytes() -> dict[str, int]:
    """What the busiest of 8 ranks saves of PEC's model, one expert a layer, over a whole round.

    Each rank has one expert of every layer and all non-expert parts. `every_rank_saves_all` is before anything is
    shared out and with all experts; `adaptive` shares parts out by what experts each rank has to save, `equal` by
    themselves.
    """
    shape = pec_shape()
    ranks = shape.layers[0].experts
    layers = [replace(layer, expert_parallel=ExpertParallel(ranks)) for layer in shape.layers]
    policy, load = Sequential(layers), Load(zeros(layers), zeros(layers))
    adaptive, equal = list[int](), list[int]()
    for step in range(ranks):
        experts = [0] * ranks
        for expert in policy.select(step, load, Budget(experts_per_layer=1)):
            experts[layers[expert.layer].owner(expert.index)] += layers[expert.layer].expert_bytes
        for found, weighed in ((adaptive, experts), (equal, [0] * ranks)):
            parts = [sum(shape.parts[name] for name in own) for own in adaptive_sharding(shape.parts, weighed)]
            found.append(max(map(sum, zip(parts, experts, strict=True))))
    own = sum(layer.expert_bytes for layer in layers)
    return {
        "every_rank_saves_all": shape.non_expert_bytes + own,
        "adaptive": max(adaptive),
        "equal": max(equal),
    }
