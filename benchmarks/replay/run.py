"""`cpsr bench replay`: what windows cost each step, and what a repeated step costs."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from cpsr.benchmarks.harness.intervals import Estimate, median_ratio_interval
from cpsr.benchmarks.harness.measurement import Measurement, interval_text, measuring
from cpsr.benchmarks.harness.processes import in_own_process
from cpsr.benchmarks.harness.ranks import run_ranks
from cpsr.benchmarks.replay.in_turn import ALONE, LIVE, paired_interval
from cpsr.benchmarks.replay.job import Shape, live_and_alone
from cpsr.benchmarks.replay.pipeline import LOGGED, WINDOWS
from cpsr.benchmarks.replay.repeated_step import KINDS, WHOLE, repeated_seconds
from cpsr.checkpoint.memory_owners import remove_memory_states
from cpsr.checkpoint.run_directory import run_id
from cpsr.errors import CPSRError

__all__ = ["PARTS", "main", "variants"]

PARTS = ("windows", "stages", "repeated")
WINDOW = 4  # iterations of the windows in bfloat16
RARELY = {"interval_iterations": 100_000}
BF16 = "bfloat16"  # weights and moments of the last variant
AIM = 1.03  # of a step without CPSR
BLOCK = 4  # steps of a variant, or all of a longer window, then as many without CPSR
TOKENS = 1024  # of a repeated step
DEFAULT = Shape()


def variants(windows: tuple[int, ...]) -> dict[str, Mapping[str, Any]]:
    """Name of each variant -> its configuration."""
    lengths = {f"windows of {one}": one for one in windows} | {f"windows of {WINDOW}, {BF16}": WINDOW}
    replayed = {
        name: {"checkpoint": RARELY, "replay": {"enabled": True, "window_iterations": one}}
        for name, one in lengths.items()
    }
    return {"whole, every iteration": {"checkpoint": RARELY, "memory": {"interval_iterations": 1}}, **replayed}


def main(
    json_path: Path | None = None,
    rounds: int = 50,
    steps: int = 160,
    windows: tuple[int, ...] = (2, 4, 8, 16),
    shape: Shape = DEFAULT,
    workdir: Path | None = None,
    parts: Collection[str] = PARTS,
) -> None:
    """Measure, print the tables, and write the JSON file.

    Args:
        json_path: of the file; None: none is written.
        rounds: of blocks, of a pipeline.
        steps: of each kind of windows; a quarter of repeated ones.
        windows: iterations of those whose cost is measured.
        shape: of their model.
        workdir: see `measuring`.
        parts: that are measured.

    Raises:
        CPSRError: a part that there is not; or a life came back with another state than the
            run that nothing happened to.
    """
    unknown = set(parts) - set(PARTS)
    if unknown:
        named = ", ".join(sorted(unknown))
        raise CPSRError(f"there is no part {named}: nothing was measured. Parts: {', '.join(PARTS)}")
    figures: dict[str, Any] = {}
    with measuring("replay", json_path, workdir) as call:
        if "windows" in parts:
            figures |= _costs(call, variants(windows), steps, shape)
        if "stages" in parts:
            figures["stages"] = _stages(call, rounds)
        if "repeated" in parts:
            figures["repeated"] = {"tokens": TOKENS, **_repeated(call, max(1, steps // 4))}
        call.leave(figures)


def _costs(call: Measurement, wanted: Mapping[str, Mapping[str, Any]], steps: int, shape: Shape) -> dict[str, Any]:
    """Blocks of each variant, in a process of its own, over those without CPSR before or behind them."""
    found, ratios, state_bytes = dict[str, dict[str, list[float]]](), dict[str, Estimate](), dict[str, int]()
    advance = call.bar("variants", len(wanted))
    for name, settings in wanted.items():
        run_dir = call.directory / name.replace(" ", "-")
        block = max(BLOCK, settings.get("replay", {}).get("window_iterations", 0))
        own = replace(shape, dtype=BF16) if name.endswith(BF16) else shape
        found[name], state_bytes[name] = in_own_process(live_and_alone, run_dir, settings, own, steps, block)
        remove_memory_states(run_id(run_dir))
        ratios[name] = paired_interval(found[name][LIVE], found[name][ALONE])
        advance()
    rows = [
        (name, f"{1e3 * median(found[name][LIVE]):.0f}", interval_text(one, digits=3)) for name, one in ratios.items()
    ]
    call.table("a step, over one without CPSR", ("snapshots", "step, ms", "ratio"), rows)
    for name, ratio in ratios.items():
        if name.startswith("windows"):
            call.judge({f"{name}: {ratio.value:.3f} of a step, to {ratio.high:.3f}, aim {AIM:g}": ratio.high <= AIM})
    plain = {name: asdict(ratio) for name, ratio in ratios.items()}
    return {"shape": asdict(shape), "state_bytes": state_bytes, "aim": AIM, "step_seconds": found, "ratios": plain}


def _stages(call: Measurement, rounds: int) -> dict[str, Any]:
    """What windows, and the logs beside them, cost the steps of a pipeline of two stages."""
    directory = call.directory / "stages"
    directory.mkdir()
    seconds, *_ = run_ranks("replay.pipeline", directory, rounds=rounds)
    pairs = (WINDOWS, ALONE), (LOGGED, ALONE), (LOGGED, WINDOWS)
    ratios = {f"{one}, over {other}": paired_interval(seconds[one], seconds[other]) for one, other in pairs}
    rows = [(name, interval_text(ratio, digits=3)) for name, ratio in ratios.items()]
    call.table(f"a step of a pipeline ({rounds} rounds)", ("steps", "ratio"), rows)
    logs = ratios[f"{LOGGED}, over {WINDOWS}"]
    call.judge({f"logs of stages: {logs.value:.3f} of a step, to {logs.high:.3f}, aim {AIM:g}": logs.high <= AIM})
    return {"step_seconds": seconds, "ratios": {name: asdict(ratio) for name, ratio in ratios.items()}}


def _repeated(call: Measurement, steps: int) -> dict[str, Any]:
    """What steps cost that leave weight gradients out, by model and by what is frozen, over whole ones of the same."""
    found, rows = dict[str, Any](), []
    advance = call.bar("models", len(KINDS))
    for kind in KINDS:
        seconds = in_own_process(repeated_seconds, kind, steps, TOKENS)
        found[kind] = {name: {"step_seconds": median(one)} for name, one in seconds.items()}
        for name, one in seconds.items():
            ratio = median_ratio_interval(one, seconds[WHOLE])
            found[kind][name] |= asdict(ratio)
            rows.append((kind, name, f"{1e3 * median(one):.0f}", interval_text(ratio, digits=3)))
        advance()
    call.table("a repeated step, over a whole one", ("model", "weights", "step, ms", "ratio"), rows)
    return found
