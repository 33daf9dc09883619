"""The training runs that the prior is fitted on; none of them is one that is reported on."""

from collections.abc import Callable
from dataclasses import dataclass

from cpsr.benchmarks.recovery.digits import DigitsTask
from cpsr.benchmarks.recovery.gpt import SIZES, GPTTask
from cpsr.benchmarks.recovery.task import Task
from cpsr.benchmarks.recovery.workload import Workload
from cpsr.demo.model import GPTConfig

__all__ = ["RUNS", "PriorRun"]

SMALL = GPTConfig(layers=2, heads=4, width=64, context=64)  # 0.1M parameters: ten times the recoveries an hour


@dataclass(frozen=True)
class PriorRun:
    """A workload and the seed of its one run; seeds from 100 on are drawn nowhere else."""

    workload: Workload
    seed: int


def _gpt(config: GPTConfig) -> Callable[[], Task]:
    return lambda: GPTTask(config)


RUNS: tuple[PriorRun, ...] = (
    PriorRun(Workload("prior-gpt-0.1M-cosine", _gpt(SMALL), "cosine", 1e-3, 2000), 100),
    PriorRun(Workload("prior-gpt-0.1M-constant", _gpt(SMALL), "constant", 4e-4, 2000), 101),
    PriorRun(Workload("prior-gpt-0.1M-cosine-hot", _gpt(SMALL), "cosine", 3e-3, 1600), 102),
    PriorRun(Workload("prior-gpt-0.4M-cosine", _gpt(SIZES["gpt-0.4M"]), "cosine", 6e-4, 2400), 103),
    PriorRun(Workload("prior-gpt-0.4M-constant", _gpt(SIZES["gpt-0.4M"]), "constant", 5e-4, 2000), 104),
    PriorRun(Workload("prior-digits-constant", DigitsTask, "constant", 3e-4, 2000), 105),
    PriorRun(Workload("prior-digits-constant-cold", DigitsTask, "constant", 1e-4, 2400), 106),
)
