"""A rank that ends steps, and does what it agrees on with the others; the test steers it by files in its folder."""

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.rank_processes import become_rank

STEPS = 3000
VERDICT_SECONDS = 4.0
STAY_SECONDS = 5.0  # after its end, for the others


@dataclass(frozen=True)
class Job:
    """What the ranks of a test do.

    Attributes:
        folder: where they leave what they found.
        port: of the store.
        step_seconds: of a step.
        machines: over which the ranks are spread.
        steps: rank -> after how many it leaves its loop; the others train on.
    """

    folder: Path
    port: int
    step_seconds: float
    machines: int = 1
    steps: dict[int, int] | None = None

    def start(self, rank: int, ranks: int) -> None:
        """One rank: train until all leave, and write down what was done at which step."""
        become_rank(self.folder / f"{rank}.log", rank, ranks)
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.port), CPSR_NODE=f"machine-{rank % self.machines}"
        )
        import torch.distributed as dist

        from cpsr.ranks import agreement
        from cpsr.ranks.board import Board
        from cpsr.ranks.group import Group

        dist.init_process_group("gloo")
        agreement.VERDICT_SECONDS = VERDICT_SECONDS
        group = Group()
        plans = [(7, 3), (9, 0)] if rank == 0 else []
        (self.folder / f"{rank}.pid").write_text(str(os.getpid()))
        stop, plan = self.folder / f"stop-{rank}", self.folder / "plan"
        board = Board.open(group)
        agreeing = agreement.Agreement(
            group, board, stop.exists, lambda: plans.pop(0) if plans and plan.exists() else None
        )
        found: dict[str, Any] = {"done": [], "slowest": 0.0, "error": None, "boards": len(board.machines)}
        steps = 0
        try:
            while steps < (self.steps or {}).get(rank, STEPS):
                time.sleep(self.step_seconds)
                steps += 1
                assert group.attendance is not None
                group.attendance.train(steps)
                began = time.perf_counter()
                done = [
                    [steps, *(int(value) for value in (one.act, one.first, one.second))] for one in agreeing.end_step()
                ]
                found["slowest"] = max(found["slowest"], time.perf_counter() - began)
                found["done"] += done
                (self.folder / f"{rank}.steps").write_text(str(steps))
                if any(act == 1 for _, act, _, _ in done):
                    break
            assert group.attendance is not None
            group.attendance.leave(steps)
            group.end(steps)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found["error"] = f"{type(error).__name__}: {error}"
        (self.folder / f"{rank}.json").write_text(json.dumps(found | {"steps": steps, "at": time.time()}))
        until = time.monotonic() + STAY_SECONDS  # a leader passes on what is said to the ranks of its machine
        while time.monotonic() < until and not all((self.folder / f"{one}.json").exists() for one in range(ranks)):
            time.sleep(0.02)
        agreeing.close()
        os._exit(0)


def main(job: Job, rank: int, ranks: int) -> None:
    """For `start_ranks`."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    job.start(rank, ranks)
