"""Real jobs of two processes, real signals at every kind of moment, and the job's end compared with a quiet run's."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cpsr.benchmarks.faults.judge import Judge
from cpsr.benchmarks.faults.life import Launched, Life
from cpsr.benchmarks.faults.outcome import Outcome
from cpsr.benchmarks.faults.part import RANKS, Fault, Part
from cpsr.benchmarks.faults.remains import remains_of, remove_memory, states_in
from cpsr.benchmarks.faults.scenarios import Scenario
from cpsr.checkpoint.memory_states import SHARED_MEMORY
from cpsr.errors import CPSRError

__all__ = ["live"]

MORE_LIVES = 2  # after the last fault: restarts that a launcher would make, too, which are counted and reported
SILENCE_SECONDS = 5.0  # after which a rank is given up: long for a busy machine, and far below what a launcher waits
SIGTERM_GRACE_SECONDS = 1.0
DAMAGED_BYTE = 64  # of the tensors


def live(directory: Path, scenarios: Sequence[Scenario]) -> Iterator[Outcome]:
    """Meet the scenarios, one after the other, each with a job of its own.

    Args:
        directory: for the runs; what one leaves that did not end well stays there.
        scenarios: in their order.

    Raises:
        CPSRError: a job that nothing happens to does not come to its end here.
    """
    quiet: dict[tuple[int, int], Life] = {}
    for number, scenario in enumerate(scenarios):
        key = scenario.zero, scenario.iterations
        if key not in quiet:
            quiet[key] = _quiet(directory / f"quiet-{key[0]}-{key[1]}", scenario)
        stage = _Stage(directory / f"{number:03d}", scenario)
        outcome = stage.run(quiet[key])
        if outcome.good:
            shutil.rmtree(stage.directory)
        yield outcome


def _quiet(directory: Path, scenario: Scenario) -> Life:
    """A job that nothing happens to."""
    # Without windows: that they change nothing shows as well.
    stage = _Stage(directory, Scenario("quiet", "exact", scenario.zero, (), iterations=scenario.iterations))
    life = stage.life(())
    if not life.good:
        raise CPSRError(f"a job to compare with did not come to its end: {life.output}")
    return life


class _Stage:
    """One scenario's run directory, and the lives of its job."""

    def __init__(self, directory: Path, scenario: Scenario) -> None:
        directory.mkdir(parents=True)
        self.directory = directory
        self._run_dir = directory / "run"
        self._scenario = scenario
        self._lives = 0
        self._nodes = tuple(directory / "memory" / str(rank) for rank in range(RANKS)) if scenario.nodes else ()
        self._memories = self._nodes or (SHARED_MEMORY,)
        self._stopped: Launched | None = None
        self._missing: list[str] = []
        self._wrong: list[str] = []

    def run(self, quiet: Life) -> Outcome:
        """All lives, judged."""
        judge = Judge(self._scenario, quiet, self._run_dir)
        try:
            for faults in [*self._scenario.lives, *[()] * (1 + MORE_LIVES)]:
                before = remains_of(self._run_dir, self._memories)
                life = self.life(faults)
                judge.see(life, before)
                self._missing += _not_met(life, faults)
                if life.hung or (life.good and self._lives > len(self._scenario.lives)):
                    break
                if self._lives == 1:
                    self._spoil_memory()
            judge.conclude(states_in(self._run_dir, self._memories))
        finally:
            if self._stopped is not None:
                self._stopped.end()
            remove_memory(self._run_dir, self._memories)
        return self._outcome(judge)

    def life(self, faults: Sequence[Fault]) -> Life:
        """One life, to its end."""
        self._lives += 1
        scenario, first = self._scenario, self._lives == 1
        launched = Launched(
            Part(
                config=self._config(),
                result=self.directory / f"life-{self._lives}",
                iterations=scenario.iterations,
                zero=scenario.zero,
                poison=scenario.poison,
                faults=tuple(faults),
                nodes=self._nodes,
            )
        )
        if self._stopped is not None:
            launched.await_begin()
            self._wrong += self._stopped.go_on()
            self._stopped = None
        life = launched.wait(ask=scenario.asked and first, keep_stopped=scenario.continued and first)
        if scenario.continued and first:
            self._stopped = launched
        return life

    def _config(self) -> dict[str, Any]:
        scenario = self._scenario
        config: dict[str, Any] = {
            "run_dir": str(self._run_dir),
            "mode": scenario.mode,
            "checkpoint": {
                "interval_iterations": scenario.interval_iterations,
                "shared_memory": scenario.shared_memory,
            },
            "ranks": {
                "heartbeat_timeout_seconds": SILENCE_SECONDS,
                "sigterm_grace_seconds": SIGTERM_GRACE_SECONDS,
            },
        }
        if scenario.window_iterations is not None:
            config["replay"] = {"enabled": True, "window_iterations": scenario.window_iterations}
        return config

    def _spoil_memory(self) -> None:
        """What the scenario has happen to the states in memory, between two lives."""
        what = self._scenario.memory
        memories = self._nodes[1:] if what == "removed" and self._nodes else self._memories
        states = states_in(self._run_dir, memories)
        if what.startswith("newest"):
            windows = [state for state in states if state.kind == "window" and state.rank == 1]
            states = [max(windows, key=lambda state: state.iteration)]
        for state in states:
            if what.endswith("removed"):
                state.path.unlink()
            elif what.endswith("damaged") and state.rank == 1:
                content = bytearray(state.path.read_bytes())
                content[state.size.header_bytes + DAMAGED_BYTE] ^= 1
                state.path.write_bytes(content)

    def _outcome(self, judge: Judge) -> Outcome:
        extra = self._lives - len(self._scenario.lives) - 1
        more = f"{extra} more restarts than faults; " if extra > 0 else ""
        lost = self._wrong + judge.lost
        return Outcome(
            scenario=self._scenario.name,
            fault=self._scenario.summary,
            injected=not self._missing,
            survived=not lost,
            state_equal=not judge.differs,
            seconds=judge.seconds_to_resume,
            what=more + "; ".join([*self._missing, *lost, *judge.differs] or [f"restarts: {', '.join(judge.methods)}"]),
        )


def _not_met(life: Life, faults: Sequence[Fault]) -> list[str]:
    """Faults that a rank never came to."""
    met = [{note["fault"] for note in life.noted(rank, "injected")} for rank in range(RANKS)]
    return [f"rank {rank} never met {fault}" for fault in faults for rank in fault.ranks if str(fault) not in met[rank]]
