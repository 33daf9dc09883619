"""Other people's loops, each run once undisturbed and once cut short and started again.

A test gives a loop as a function at the top of its module. The loop runs in forked processes that really die. It
finds its settings in a `Life`, calls `life.step(iteration)` after each step, and returns a digest of what it trained::

    def clipped_weights(life: Life) -> str:
        ...
        with CPSRRecovery(TorchAdapter(model, optimizer), life.config()) as recovery:
            for batch in recovery.resume(loader, epochs=1):
                ...
                life.step(recovery.iteration)
        return digest(model)

    def test_weights_clipped_after_the_step(tmp_path: Path) -> None:
        alone, cut = alone_and_cut(clipped_weights, tmp_path, at=13, how=signal.SIGTERM)
        assert cut.result == alone.result
"""

import hashlib
import json
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.rank_processes import become_rank, free_port, start_ranks

__all__ = ["Ended", "Life", "alone_and_cut", "backward", "digest", "forked", "live"]

LIMIT_SECONDS = 120.0  # for what takes a second; the machine may be busy


@dataclass
class Life:
    """One life of a job, as its loop sees it.

    Attributes:
        directory: holds the run directory and what the loop leaves for the test.
        at: the iteration at which this life is cut short; 0: it is left alone.
        how: the signal that cuts it.
        on_rank: the rank that is cut; None: each one.
        rank: this process's.
        ranks: how many there are.
        number: of the life, from 0.
        options: for the loop.
    """

    directory: Path
    at: int = 0
    how: signal.Signals = signal.SIGKILL
    on_rank: int | None = 0
    rank: int = 0
    ranks: int = 1
    number: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def config(self, **more: Any) -> dict[str, Any]:
        """Mode exact and a checkpoint every five iterations, unless told otherwise."""
        return {
            "run_dir": str(self.directory / "run"),
            "mode": "exact",
            "checkpoint": {"interval_iterations": 5},
            **more,
        }

    def step(self, iteration: int) -> None:
        """Cut this life short here if its time has come."""
        if iteration == self.at and self.on_rank in (None, self.rank):
            os.kill(os.getpid(), self.how)


@dataclass(frozen=True)
class Ended:
    """How one life ended, by rank.

    Attributes:
        statuses: exit statuses; negative: the signal that killed the rank.
        results: what the loop returned; None if it did not return.
        output: all that the ranks printed.
    """

    statuses: Sequence[int | None]
    results: Sequence[Any]
    output: str

    @property
    def result(self) -> Any:
        """What the loop of rank 0 returned."""
        assert self.results[0] is not None, self.output[-4000:]
        return self.results[0]


Loop = Callable[[Life], Any]


def live(loop: Loop, life: Life, *, seconds: float = LIMIT_SECONDS) -> Ended:
    """Run one life to its end; a rank that has not ended after `seconds` fails the test."""
    life.directory.mkdir(parents=True, exist_ok=True)
    processes = start_ranks(_rank, (loop, life, str(free_port())), life.ranks)
    for process in processes:
        process.join(seconds)
    hangs = [rank for rank, process in enumerate(processes) if process.exitcode is None]
    for process in processes:
        process.kill()
        process.join()
    output = "".join(_left(life, rank, ".log") for rank in range(life.ranks))
    assert not hangs, f"ranks {hangs} have not ended after {seconds:g} s:\n{output[-4000:]}"
    results = [json.loads(_left(life, rank, ".json") or "null") for rank in range(life.ranks)]
    return Ended([process.exitcode for process in processes], results, output)


def alone_and_cut(
    loop: Loop, folder: Path, *, at: int, how: signal.Signals = signal.SIGKILL, ranks: int = 1, **options: Any
) -> tuple[Ended, Ended]:
    """The end of a run that is left alone, and of one that was cut at iteration `at` and started again."""
    alone = live(loop, Life(folder / "alone", ranks=ranks, options=options))
    live(loop, Life(folder / "cut", at, how, None if how == signal.SIGKILL else 0, ranks=ranks, options=options))
    again = live(loop, Life(folder / "cut", ranks=ranks, number=1, options=options))
    return alone, again


def forked(loop: Loop, lives: Sequence[Life]) -> list[Any]:
    """What the loop returned in each of these lives, one after the other; None if it did not return.

    Call it inside a life, where a package is imported that takes seconds: each of these is a fork of that process.
    """
    results = []
    for life in lives:
        life.directory.mkdir(parents=True, exist_ok=True)
        left = life.directory / f"{life.number}-forked.json"
        left.unlink(missing_ok=True)
        if not (child := os.fork()):
            os.environ["MASTER_PORT"] = str(free_port())  # workers of the life before may still have the old one
            left.write_text(json.dumps(loop(life)))
            sys.stdout.flush()
            os._exit(0)  # an error ends it as it would end the process that it is a fork of
        os.waitpid(child, 0)
        results.append(json.loads(left.read_text()) if left.exists() else None)
    return results


def backward(loss: torch.Tensor) -> None:
    """`loss.backward()`, which torch has not typed."""
    loss.backward()  # type: ignore[no-untyped-call]


def digest(*modules: torch.nn.Module) -> str:
    """A hash of all tensors of the modules' states."""
    found = hashlib.sha256()
    for module in modules:
        for value in module.state_dict().values():
            if torch.is_tensor(value):
                found.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _left(life: Life, rank: int, ending: str) -> str:
    path = life.directory / f"{life.number}-{rank}{ending}"
    return path.read_text(errors="replace") if path.exists() else ""


def _rank(job: tuple[Loop, Life, str], rank: int, ranks: int) -> None:
    loop, life, port = job
    life.rank = rank
    become_rank(life.directory / f"{life.number}-{rank}.log", rank, ranks)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    vars(multiprocessing.current_process())["_config"]["daemon"] = False  # workers of a loader are children of it
    multiprocessing.set_start_method("fork", force=True)  # as in a script; the rank itself is of a server of forks
    try:
        result = loop(life)
    except Exception:
        traceback.print_exc()
        raise
    (life.directory / f"{life.number}-{rank}.json").write_text(json.dumps(result))
