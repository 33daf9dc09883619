"""`cpsr bench predictor`: memory and speed of prediction at the size of a real model."""

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from cpsr.benchmarks.harness.measurement import measuring
from cpsr.benchmarks.harness.processes import in_own_process
from cpsr.benchmarks.predictor_cost.history import SIZES, SyntheticHistory
from cpsr.benchmarks.predictor_cost.measure import find_methods, measure_method
from cpsr.benchmarks.predictor_cost.plot import draw
from cpsr.benchmarks.predictor_cost.report import show
from cpsr.benchmarks.predictor_cost.result import MEGABYTE, summarise
from cpsr.benchmarks.predictor_cost.training import training_seconds
from cpsr.demo.device import CPU
from cpsr.demo.model import GPTConfig
from cpsr.errors import ConfigError

__all__ = ["CACHE", "main"]

CACHE = Path("runs/bench-predictor")


def main(
    parameters: str = "350M",
    checkpoints: int = 8,
    methods: str = "default",
    repeats: int = 7,
    tokens: int = 256,
    cache: Path = CACHE,
    keep: bool = False,
    json_path: Path | None = None,
    sizes: dict[str, GPTConfig] = SIZES,
    device: str = CPU,
) -> None:
    """Train a few iterations, write the history, predict from it, print the table, and write the figures.

    Args:
        parameters: one of `sizes`.
        checkpoints: in the history, at least 3.
        methods: names of `METHODS`, comma-separated.
        repeats: paired turns of reading and predicting, for each method.
        tokens: a training batch is one sequence of this length.
        cache: holds the history.
        keep: leave the history there, for the next call.
        json_path: where the figures go; the plot is put beside it.
        sizes: name -> shape of the model.
        device: `cpu` or `cuda`, which the iterations train on; predictions are the CPU's.

    Raises:
        ConfigError: an argument names nothing that there is.
        CPSRError: the disk or the memory does not suffice.
    """
    names = find_methods(methods)
    if parameters not in sizes:
        raise ConfigError(f"--parameters {parameters} is not known; there are {', '.join(sizes)}")
    if tokens > (config := sizes[parameters]).context:
        raise ConfigError(f"--tokens {tokens}: the context of {parameters} is {config.context}")
    history = SyntheticHistory(cache / f"{parameters}-{checkpoints}", config, checkpoints)
    with ExitStack() as stack, measuring("predictor", json_path, place=cache, device=device) as call:
        if not keep:
            stack.callback(history.remove)
        step = call.bar("training, history, prediction", 1 + checkpoints + len(names))
        iterations = in_own_process(training_seconds, config, tokens, device)  # ends before the page cache is filled
        step()
        history.write(step)
        samples = []
        for name in names:
            samples.append(in_own_process(measure_method, name, history, repeats))
            step()
        results = [summarise(sample, iterations) for sample in samples]
        title = f"{history.parameters / MEGABYTE:.0f}M parameters, {checkpoints} checkpoints"
        show(call.console, results, call.machine, title, repeats, tokens)
        figures = {
            "model": asdict(config),
            "parameters": history.parameters,
            "checkpoints": checkpoints,
            "training": {"tokens": tokens, "iteration_seconds": list(iterations)},
            "results": [result.to_json() for result in results],
        }
        call.leave(figures, draw(results, samples, call.machine, title))
