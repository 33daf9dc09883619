"""How long a job stands still after the loss of a machine: with a spare, and without one.

    python -m benchmarks.tests.measure_spare --json benchmarks/results/<date>-spare.json

Needs root: the machines are kernel namespaces of this one. The job is that of `machines_job.py`: two ranks of DDP, a
step of 0.1 s, states in memory with one replica. The loss: the network is down, and all processes are killed.
"""

import argparse
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from cpsr.benchmarks.harness.intervals import median_interval
from cpsr.benchmarks.harness.measurement import interval_text, measuring
from cpsr.demo.machines import Machines
from tests.launch.machine_jobs import MachineJob
from tests.launch.test_spare import SETTINGS

KEEP_ALIVE = {"torch's default, 5 s x 3": {}, "1 s x 5": {"keep_alive_interval": 1, "keep_alive_max_attempt": 5}}
SPARE, AGAIN, WHOLE = "a spare", "its launcher starts again at once", "all launchers start again at once"
STEADY_SECONDS = 8.0  # of training before the loss, in which warm processes become ready


def main() -> None:
    """Measure each way in turn, print the table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    ways = [(way, name) for name in KEEP_ALIVE for way in (SPARE, AGAIN)]
    ways.append((WHOLE, next(iter(KEEP_ALIVE))))  # whose launchers meet anew, and wait for nobody
    with measuring("spare", arguments.json) as call:
        step = call.bar("losses", len(ways) * arguments.rounds)
        seconds: dict[tuple[str, str], list[float]] = {one: [] for one in ways}
        for number in range(arguments.rounds):
            for way, name in ways:
                with tempfile.TemporaryDirectory(dir=call.directory) as directory:
                    delay = number / arguments.rounds  # the loss comes at another moment of the keep-alive's interval
                    seconds[way, name].append(_stands_still(Path(directory), way, KEEP_ALIVE[name], delay))
                step()
        found = {one: median_interval(own) for one, own in seconds.items()}
        rows = [
            (way, name, interval_text(found[way, name], digits=1), f"{min(own):.1f} to {max(own):.1f}")
            for (way, name), own in seconds.items()
        ]
        call.table("From the loss to the first new step", ("way", "keep-alive", "seconds", "range"), rows)
        figures = [
            {"way": way, "keep_alive": name, "median": asdict(found[way, name]), "seconds": own}
            for (way, name), own in seconds.items()
        ]
        call.leave({"rounds": arguments.rounds, "ways": figures})


def _stands_still(directory: Path, way: str, keep_alive: dict[str, int], delay: float) -> float:
    """Seconds from the loss of machine 1 to the first step of all ranks that is trained after it."""
    with Machines(3, directory) as machines:
        job = MachineJob(machines, directory, settings=SETTINGS, nodes="2", rendezvous=keep_alive)
        life = job.begin(2, iterations=12)
        if way == SPARE:
            job.start(2, 0, "--spare")
        warm = [0, 2] if way == SPARE else [0]
        job.until(lambda: all("Restarts fork" in job.output(machine) for machine in warm))
        time.sleep(STEADY_SECONDS + 5.0 * delay)
        machines.cut_off(1)
        lost = time.monotonic()
        job.kill(*((0, 1) if way == WHOLE else (1,)))
        if way != SPARE:
            machines.forget(1)
            machines.reconnect(1)
            for machine in (0, 1) if way == WHOLE else (1,):
                job.start(machine)
        after = job.reached(2, iterations=1, after=life)
        seconds = time.monotonic() - lost
        assert job.begins()[after]["method"] == "exact", job.everything()
        assert job.finish()[0] == 0, job.everything()
        return seconds


if __name__ == "__main__":
    main()
