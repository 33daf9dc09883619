"""`cpsr bench boost`: tune the baseline, choose settings, and report on other seeds, on each corpus."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from cpsr.benchmarks.boost.average import Plain
from cpsr.benchmarks.boost.report import draw, plain, show
from cpsr.benchmarks.boost.result import MOVE, OUTER, RANDOM, CorpusResult, corpus_result
from cpsr.benchmarks.boost.selection import SELECTION_SEEDS, Candidate, Chosen, Wanted, selected
from cpsr.benchmarks.boost.trial import Outcome, Trial, outcome
from cpsr.benchmarks.harness.machine import machine_text
from cpsr.benchmarks.harness.measurement import measuring
from cpsr.benchmarks.harness.processes import Workers
from cpsr.benchmarks.recovery.ending import Training
from cpsr.benchmarks.recovery.workload import ITERATIONS
from cpsr.benchmarks.tune.space import Setting
from cpsr.benchmarks.tune.sweep import Sweep, sweep
from cpsr.demo.device import CPU
from cpsr.errors import CPSRError
from cpsr.fitter.end_cost import Ending

__all__ = ["CACHE", "LENGTH_SHARES", "SETTINGS", "main"]

CACHE = Path("runs/bench-boost")
SETTINGS = tuple(
    Setting(task, "cosine10", ITERATIONS) for task in ("gpt-0.1M", "gpt-0.1M-documentation", "gpt-0.1M-headers")
)
LENGTH_SHARES = (0.9, 0.95, 1.05, 1.1)  # of the baselines that show what an iteration is worth


class Laboratory:
    """Trains what is asked for, or reads what was kept.

    Args:
        cache: keeps every training.
        pool: processes that train.
    """

    def __init__(self, cache: Path, pool: Workers) -> None:
        self._cache = cache
        self._pool = pool

    def sweep(self, setting: Setting) -> Sweep:
        """Tune the baseline, on the seeds of the selection."""
        (found,) = sweep([setting], len(SELECTION_SEEDS), self._cache, CPU, self._pool, first_seed=SELECTION_SEEDS[0])
        return found

    def choose(self, tuned: Sweep) -> Chosen:
        """Choose settings of all ways."""
        return selected(lambda wanted: self._outcomes(tuned, wanted))

    def report(self, tuned: Sweep, chosen: Chosen, seeds: int) -> CorpusResult:
        """Compare on seeds from 0 on."""
        candidates = {"": Candidate(Plain()), MOVE: chosen.move, RANDOM: chosen.random, OUTER: chosen.outer}
        wanted = [(candidate, seed) for candidate in candidates.values() for seed in range(seeds)]
        outcomes = iter(self._outcomes(tuned, wanted))
        found = {way: [next(outcomes) for _ in range(seeds)] for way in candidates}
        baseline = found.pop("")
        losses = {way: tuple(one.ended.loss for one in of) for way, of in found.items()}
        for name in (chosen.ema, chosen.lawa):
            losses[name] = tuple(one.averages.get(name) for one in baseline)
        return corpus_result(tuned, chosen, [one.ended.loss for one in baseline], self._lengths(tuned, seeds), losses)

    def _lengths(self, tuned: Sweep, seeds: int) -> list[Ending]:
        workload = tuned.setting.workload(tuned.best.step)
        trials = [
            Trial(Training(workload.of_length(round(share * workload.iterations)), seed, self._cache, CPU), Plain())
            for seed in range(seeds)
            for share in LENGTH_SHARES
        ]
        endings = []
        for trial, one in zip(trials, self._pool.each(outcome, trials), strict=True):
            training, loss = trial.training, one.ended.loss
            if loss is None:
                raise CPSRError(f"{training.workload.name}, seed {training.seed}: a baseline diverged")
            endings.append(Ending(training.seed, training.workload.iterations, loss))
        return endings

    def _outcomes(self, tuned: Sweep, wanted: Wanted) -> list[Outcome]:
        trials = [
            Trial(
                Training(tuned.setting.workload(tuned.best.step - candidate.lower), seed, self._cache, CPU),
                candidate.way,
            )
            for candidate, seed in wanted
        ]
        return self._pool.each(outcome, trials)


def main(
    settings: Sequence[Setting] = SETTINGS,
    seeds: int = 5,
    cache: Path = CACHE,
    json_path: Path | None = None,
    workers: int = 1,
) -> None:
    """Tune, choose, compare, print, draw and write.

    Args:
        settings: what is trained.
        seeds: that are reported on, from 0 on.
        cache: keeps every training; an interrupted call goes on from there.
        json_path: where the figures go, with the plot beside it.
        workers: processes, of one thread each.

    Raises:
        CPSRError: a baseline cannot be tuned, or its length shows no worth of an iteration.
    """
    with measuring("boost", json_path, place=cache.parent, timed=False) as call, Workers(workers) as pool:
        call.machine.update(torch_threads=1, workers=workers)
        laboratory = Laboratory(cache, pool)
        step = call.bar("corpora", total=len(settings))
        results = []
        for setting in settings:
            tuned = laboratory.sweep(setting)
            results.append(laboratory.report(tuned, laboratory.choose(tuned), seeds))
            step()
        show(call.console, results)
        call.console.print(machine_text(call.machine))
        figures = {"seeds": seeds, "settings": [asdict(one) for one in settings], **plain(results)}
        call.leave(figures, draw(results, call.machine))
