"""`cpsr bench experts`: sparse snapshots by every policy of the papers, and what failures then cost."""

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray
from pydantic import BaseModel
from rich.console import Console
from rich.progress import Progress

from cpsr.benchmarks.experts.costs import Cost, costs
from cpsr.benchmarks.experts.exposure import SMALL_SNAPSHOT_SHARE, SNAPSHOT_SHARE, Exposure, exposure
from cpsr.benchmarks.experts.kept import kept
from cpsr.benchmarks.experts.names import MODES, MOETION, STALE
from cpsr.benchmarks.experts.plot import draw
from cpsr.benchmarks.experts.policies import CONFIGURED, IN_TURN
from cpsr.benchmarks.experts.reaches import reaches
from cpsr.benchmarks.experts.report import show
from cpsr.benchmarks.experts.result import Arithmetic, Result, Stalled, compared, recovered, stalled
from cpsr.benchmarks.experts.routing import SKEWS, Trace, drawn_shares, synthetic_trace
from cpsr.benchmarks.experts.scheduling import scheduling
from cpsr.benchmarks.experts.shapes import SPREAD_OF_64
from cpsr.benchmarks.experts.sizes import expert_sweep, rank_bytes, sizes
from cpsr.benchmarks.experts.tasks import FailingTask, Failures, Mixture, StallTask, Task, WritesTask
from cpsr.benchmarks.experts.written import written
from cpsr.benchmarks.machine import busy_warning, describe_machine
from cpsr.benchmarks.output import progress_bar, save, save_beside, warnings_only, work_directory
from cpsr.benchmarks.overhead.launch import launch
from cpsr.demo.model import GPTConfig
from cpsr.errors import ConfigError

__all__ = ["CACHE", "FULL", "PARTS", "QUICK", "Size", "main"]

CACHE = Path("runs/bench-experts")
PARTS = ("arithmetic", "stall", "writes", "failures")
TIMEOUT_SECONDS = 3600.0  # of a job that times stalls: minutes on a quiet machine
RUN_TIMEOUT_SECONDS = 600.0  # of each run of the others: one or two minutes there
TRACE_ITERATIONS, TRACE_LAYERS, TRACE_TOKENS = 200, 3, 4096


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        seeds: runs of each model that fails.
        failing: models that fail.
        failures: when, and by which policies they are saved.
        stalling: models with a snapshot after every iteration.
        pairs: blocks with and without these, for each way to choose operators.
        writing: models whose ranks share out what they hold alike.
        rounds: checkpoints of these, by each way to share it out.
    """

    seeds: int
    failing: tuple[Mixture, ...]
    failures: Failures
    stalling: tuple[Mixture, ...]
    pairs: int
    writing: tuple[Mixture, ...]
    rounds: int

    def with_failing(
        self,
        seeds: int | None,
        batch_windows: int | None,
        policies: Collection[str] | None = None,
        modes: Collection[str] | None = None,
    ) -> "Size":
        """The same with other runs that fail.

        Args:
            seeds: of each model; None: as they are.
            batch_windows: of each of their iterations; None: as they are.
            policies: by which each is saved, as configurations name them; None: as they are.
            modes: what becomes of older experts, some of `MODES`, beside `STALE`, which is always measured; None: as
                they are.

        Raises:
            ConfigError: the ranks of a model cannot share so many windows equally; or a name is not known.
        """
        failing = self.failing
        if batch_windows is not None:
            uneven = [mixture.ranks for mixture in failing if batch_windows % mixture.ranks]
            if uneven:
                raise ConfigError(f"--batch-windows {batch_windows}: {uneven[0]} ranks must share them equally")
            failing = tuple(mixture.model_copy(update={"batch_windows": batch_windows}) for mixture in failing)
        chosen: dict[str, tuple[str, ...]] = {}
        if policies is not None:
            chosen["policies"] = _named("--policies", policies, CONFIGURED)
        if modes is not None:
            chosen["modes"] = tuple(dict.fromkeys((STALE, *_named("--modes", modes, MODES))))
        failures = self.failures.model_copy(update=chosen)
        return replace(self, seeds=self.seeds if seeds is None else seeds, failing=failing, failures=failures)


# Steps long enough that beginning a snapshot, which takes the same time whatever its size, is not all there is.
_WIDER = Mixture(expert_parallel=2, ranks=2, gpt=GPTConfig(layers=4, heads=4, width=128, context=128))
_LONGER = _WIDER.model_copy(update={"batch_windows": 16})
_SHARED = tuple(Mixture(experts_per_token=k, expert_parallel=ep, ranks=2) for k in (1, 2) for ep in (1, 2))
# Three layers of experts, of which two ranks cannot save equally many, and enough bytes that the disk decides.
_WRITTEN = tuple(
    Mixture(expert_parallel=ep, ranks=2, gpt=GPTConfig(layers=6, heads=4, width=256, context=64)) for ep in (1, 2)
)
QUICK = Size(
    seeds=4,
    failing=(Mixture(),),
    failures=Failures(),
    stalling=(_SHARED[1],),
    pairs=10,
    writing=(_WRITTEN[1],),
    rounds=10,
)
# With four times the tokens an iteration moves experts further and less at random, and what they miss is seen better.
FULL = Size(
    seeds=3,
    failing=(Mixture(batch_windows=32), Mixture(experts_per_token=2), _SHARED[1]),
    failures=Failures(policies=(IN_TURN, MOETION)),
    stalling=(*_SHARED, _WIDER, _LONGER),
    pairs=20,
    writing=_WRITTEN,
    rounds=20,
)


@dataclass
class _Samples:
    """What the jobs measured."""

    stalls: dict[str, Any] = field(default_factory=dict)
    writes: dict[str, Any] = field(default_factory=dict)
    costs: list[Cost] = field(default_factory=list)
    reaches: list[tuple[str, Any]] = field(default_factory=list)  # label of the model, and what its job told
    traces: list[Trace] = field(default_factory=list)


def main(
    json_path: Path | None = None,
    size: Size = QUICK,
    parts: Collection[str] = PARTS,
    workers: int = 2,
    workdir: Path | None = None,
    cache: Path = CACHE,
) -> None:
    """Measure, print the tables, and write the JSON file with its plots.

    Args:
        json_path: where the figures go; the plots are put beside it.
        size: how much is measured.
        parts: some of `PARTS`. arithmetic: bytes, tokens at risk and scheduling; stall: a snapshot after every
            iteration; writes: checkpoints that ranks share out; failures: four in one run.
        workers: jobs of one rank that run beside each other; what is timed runs alone.
        workdir: holds the jobs' directories; by default a temporary one.
        cache: keeps what jobs with failures told.

    Raises:
        ConfigError: a part is not known.
        CPSRError: a job failed.
    """
    _require_known("--parts", parts, PARTS)
    console = Console()
    with work_directory(workdir) as directory, warnings_only(console), progress_bar(console) as progress:
        machine = describe_machine(directory)
        if warning := busy_warning(machine):
            console.print(f"[yellow]{warning}[/yellow]")
        samples = _Samples()
        if "stall" in parts:
            _measure_stalls(samples, directory, size, progress)
        if "writes" in parts:
            _measure_writes(samples, directory, size, progress)
        if "failures" in parts:
            _measure_failures(samples, directory, size, workers, progress, partial(kept, cache, machine=machine))
    result = _result(samples, "arithmetic" in parts)
    show(console, machine, result)
    if json_path is not None:
        report = {
            "benchmark": "experts",
            "machine": machine,
            "size": _plain(size),
            "aims": result.aims(),
            "result": asdict(result),
            "samples": {
                "stalls": samples.stalls,
                "writes": samples.writes,
                "costs": [cost.to_json() for cost in samples.costs],
            },
        }
        (_, first), *others = draw(result, samples.costs, machine).items()
        plots = [save(json_path, report, first), *(save_beside(json_path, name, figure) for name, figure in others)]
        console.print(f"figures: {json_path}   plots: {', '.join(map(str, plots))}")


def _measure_stalls(samples: _Samples, directory: Path, size: Size, progress: Progress) -> None:
    bar = progress.add_task("snapshots after every iteration", total=len(size.stalling))
    for mixture in size.stalling:
        task = StallTask(mixture=mixture, pairs=size.pairs, experts_per_layer=size.failures.experts_per_layer)
        samples.stalls[mixture.label] = _launched(directory / f"stall-{len(samples.stalls)}", task, TIMEOUT_SECONDS)
        progress.advance(bar)


def _measure_writes(samples: _Samples, directory: Path, size: Size, progress: Progress) -> None:
    bar = progress.add_task("checkpoints that ranks share out", total=len(size.writing))
    for mixture in size.writing:
        task = WritesTask(mixture=mixture, rounds=size.rounds, experts_per_layer=size.failures.experts_per_layer)
        samples.writes[mixture.label] = _launched(directory / f"writes-{len(samples.writes)}", task, TIMEOUT_SECONDS)
        progress.advance(bar)


def _measure_failures(
    samples: _Samples,
    directory: Path,
    size: Size,
    workers: int,
    progress: Progress,
    kept_or: Callable[..., Any],
) -> None:
    tasks = [
        FailingTask(mixture=mixture, seed=seed, failures=size.failures)
        for mixture in size.failing
        for seed in range(size.seeds)
    ]
    runs = 1 + len(size.failures.policies) * len(size.failures.modes)  # the first without failures
    bar = progress.add_task("runs with failures", total=len(tasks))

    def follow(place: int) -> Any:
        task = tasks[place]

        def measured() -> Any:
            told = _launched(directory / f"failing-{place}", task, runs * RUN_TIMEOUT_SECONDS)
            costs(task, told)  # a training that diverged is named, and not kept
            return told

        found = kept_or(task=task, measure=measured)
        progress.advance(bar)
        return found

    alone = [place for place, task in enumerate(tasks) if task.mixture.ranks == 1]
    with ThreadPoolExecutor(workers) as pool:
        found = dict(zip(alone, pool.map(follow, alone), strict=True))
    for place, task in enumerate(tasks):
        if place not in found:  # its ranks fill the cores
            found[place] = follow(place)
        samples.costs += costs(task, found[place])
        samples.reaches.append((task.mixture.label, found[place]))
        if task.seed == 0:
            tokens = numpy.asarray(found[place]["tokens"], dtype=numpy.int64)
            samples.traces.append(Trace(f"measured: {task.mixture.label}, seed 0", tokens))


def _launched(directory: Path, task: Task, timeout_seconds: float) -> Any:
    directory.mkdir()
    found = launch(directory, "experts.job", task.mixture.ranks, timeout_seconds, task=task.model_dump_json())
    return found[0]


def _result(samples: _Samples, with_arithmetic: bool) -> Result:
    arithmetic = None
    if with_arithmetic:
        exposures = _exposures(samples.traces)
        arithmetic = Arithmetic(sizes(), expert_sweep(), rank_bytes(), scheduling(), exposures)
    stalls: list[Stalled] = [one for label, found in samples.stalls.items() for one in stalled(label, found)]
    found = recovered(samples.costs), compared(samples.costs), reaches(samples.reaches)
    return Result(arithmetic, stalls, *found, [one for item in samples.writes.items() for one in written(*item)])


def _exposures(measured: list[Trace]) -> list[Exposure]:
    """Tokens at risk with the spread of MOETION's paper, with drawn ones, and with those that were measured."""
    found = []
    experts = len(SPREAD_OF_64)
    spread = _synthetic("80% to 6 of 64 (MOETION)", [numpy.asarray(SPREAD_OF_64) / 100] * TRACE_LAYERS)
    found += [exposure(spread, experts // share) for share in (SNAPSHOT_SHARE, SMALL_SNAPSHOT_SHARE)]
    for skew in SKEWS:
        # With more experts in a snapshot nothing would be at risk: few experts have all the tokens.
        drawn = _synthetic(f"drawn, skew {skew:g}", drawn_shares(skew, experts, TRACE_LAYERS, seed=0))
        found.append(exposure(drawn, experts // SMALL_SNAPSHOT_SHARE))
    return [*found, *(exposure(trace, trace.tokens.shape[2] // SNAPSHOT_SHARE) for trace in measured)]


def _synthetic(source: str, shares: list[NDArray[numpy.float64]]) -> Trace:
    return synthetic_trace(source, shares, TRACE_ITERATIONS, TRACE_TOKENS, seed=0)


def _named(option: str, asked: Collection[str], labels: Mapping[str, str]) -> tuple[str, ...]:
    """What the names stand for, each once and always in the same order: the same choice is the same task."""
    _require_known(option, asked, labels)
    return tuple(label for name, label in labels.items() if name in asked)


def _require_known(option: str, asked: Collection[str], known: Collection[str]) -> None:
    unknown = sorted(set(asked) - set(known))
    if unknown or not asked:
        raise ConfigError(f"{option} {', '.join(unknown) or 'is empty'}: there are {', '.join(known)}")


def _plain(size: Size) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, BaseModel):
            return value.model_dump()
        return [plain(one) for one in value] if isinstance(value, tuple) else value

    return {name: plain(value) for name, value in vars(size).items()}
