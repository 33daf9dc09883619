"""`cpsr bench overhead`: what the wrapper and the predictor cost while a job trains."""

from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

from cpsr.benchmarks.harness.measurement import measuring
from cpsr.benchmarks.overhead.blocks import BLOCK_STEPS
from cpsr.benchmarks.overhead.parts import DEFAULT, PARTS, Samples, Size, obstacles
from cpsr.benchmarks.overhead.plot import draw_all
from cpsr.benchmarks.overhead.report import show
from cpsr.demo.device import CPU, describe_device
from cpsr.errors import ConfigError

__all__ = ["main"]


def main(
    json_path: Path | None = None,
    size: Size = DEFAULT,
    parts: Collection[str] = tuple(PARTS),
    workdir: Path | None = None,
    device: str = CPU,
) -> None:
    """Measure, print the tables, and write the JSON file with its plots.

    Args:
        json_path: where the figures go; the plots are put beside it.
        size: how much is measured.
        parts: some of `PARTS`. wrapper: steps without a checkpoint; bubbles: the stages of a pipeline, and their step
            time; memory: over a run. Those that the device cannot run are left out, and named.
        workdir: holds the runs' directories; by default a temporary one.
        device: `cpu` or `cuda`, which the jobs train on.

    Raises:
        ConfigError: a part is not known, or the device can run none of them.
        CPSRError: a job failed.
    """
    unknown = sorted(set(parts) - set(PARTS))
    if unknown or not parts:
        raise ConfigError(f"--parts {', '.join(unknown) or 'is empty'}: there are {', '.join(PARTS)}")
    left_out = obstacles(parts, device, describe_device(device).get("count", 0))
    parts = [part for part in PARTS if part in parts and part not in left_out]
    if not parts:
        raise ConfigError(f"nothing to measure: {'; '.join(left_out.values())}. Name other --parts, or --device cpu")
    samples = Samples()
    with measuring("overhead", json_path, workdir, device=device) as call:
        for part, why in left_out.items():
            call.console.print(f"[yellow]{part} left out: {why}[/yellow]")
        step = call.bar("runs", size.runs * len(parts))
        for number in range(size.runs):
            for part in parts:
                run_directory = call.directory / f"{part}-{number}"
                run_directory.mkdir()
                PARTS[part](samples, run_directory, size, device)
                step()
        variants, bubbles, memory = samples.variants(), samples.bubbles(), samples.memory(size.timeline_model)
        show(call.console, call.machine, variants, bubbles, memory)
        figures = {
            "size": asdict(size),
            "block_steps": BLOCK_STEPS,
            "left_out": left_out,
            "results": [result.to_json() for result in variants],
            "bubbles": bubbles and bubbles.to_json(),
            "memory": memory and memory.to_json(),
        }
        call.leave(figures, draw_all(samples.memory_runs, variants, bubbles, call.machine))
