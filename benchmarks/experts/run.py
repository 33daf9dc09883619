"""`cpsr bench experts`: bytes of sparse snapshots beside the papers, and the time that policies take to choose."""

from dataclasses import asdict
from pathlib import Path

from cpsr.benchmarks.experts.arithmetic import IN_TURN, MOETION, OPERATORS, SnapshotSize, rank_bytes, scheduling, sizes
from cpsr.benchmarks.experts.shapes import MOETION_EXPERTS, moetion_shape, pec_shape
from cpsr.benchmarks.harness.measurement import measuring

__all__ = ["main"]

SCHEDULING_AIM_SECONDS = 0.1
# Of the whole state (pec, Fig. 5 (a); moetion, section 7.2: "over 9x").
SAVED_AIMS = {(pec_shape().name, IN_TURN): 0.542, (moetion_shape(MOETION_EXPERTS).name, MOETION): 1 - 1 / 9}
ROUNDING = 0.0005  # of the papers' figures
GIGABYTE = 1e9


def main(json_path: Path | None = None) -> None:
    """Compute, print the tables, and write the JSON file.

    Args:
        json_path: where the figures go.
    """
    with measuring("experts", json_path) as call:
        found, busiest, chosen = sizes(), rank_bytes(), scheduling()
        call.table(
            "Bytes of a snapshot (arithmetic, on the papers' shapes)",
            ("model", "policy", "K", "GB", "less", "factor", "all within"),
            [_row(size) for size in found],
        )
        less = 1 - busiest.adaptive / busiest.every_rank_saves_all
        shorter = 1 - busiest.adaptive / busiest.equal
        call.console.print(
            f"With one expert a layer and parts shared out by what each rank has to save, the busiest of 8 ranks saves "
            f"{less:.1%} less (PEC: 76.9%), and {shorter:.1%} less than with parts shared out by themselves (PEC: "
            "11.7% of the time)."
        )
        call.table(
            f"Choosing among {OPERATORS:,} operators",
            ("policy", "ms", "chosen"),
            [(one.policy, f"{1e3 * one.seconds:.1f}", f"{one.chosen:,}") for one in chosen],
        )
        aims = {}
        for size in found:
            saved = SAVED_AIMS.get((size.shape, size.policy))
            if saved is not None:
                aims[f"{size.shape}, {size.policy}: {saved:.1%} smaller snapshots: {size.saved:.1%}"] = (
                    size.saved >= saved - ROUNDING
                )
        slowest = max(one.seconds for one in chosen)
        aims[f"{OPERATORS:,} operators scheduled in {SCHEDULING_AIM_SECONDS} s: {slowest:.3f} s"] = (
            slowest < SCHEDULING_AIM_SECONDS
        )
        for aim, met in aims.items():
            call.judge(aim, met)
        figures = {
            "aims": aims,
            "sizes": [asdict(size) for size in found],
            "rank_bytes": asdict(busiest),
            "scheduling": [asdict(one) for one in chosen],
        }
        call.leave(figures)


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
