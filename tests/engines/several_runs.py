"""One rank that trains several runs one after the other: starting a job is what takes the time."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from cpsr import CPSRRecovery
from tests.recovery import worker


@dataclass(frozen=True)
class Options:
    """What the job does.

    Attributes:
        config: CPSR's configuration; `run_dir` is where each run gets a folder of its own.
        result: where the result goes, `.<rank>.json` appended.
        iterations: end of each run.
        runs: name -> `engine` (options of `tests.recovery.worker`), `settings` (more of the configuration) and `fault`.
        fault, committed: not used here.
    """

    config: dict[str, Any]
    result: Path
    iterations: int
    runs: dict[str, dict[str, Any]]
    fault: str = ""
    committed: Path | None = None


def main(options: Options, rank: int, ranks: int) -> None:
    worker.initialize_ranks(options.result)
    found = {name: train(options, name, rank, **run) for name, run in options.runs.items()}
    options.result.with_suffix(f".{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def train(
    options: Options, name: str, rank: int, engine: dict[str, Any], settings: dict[str, Any], fault: str = ""
) -> dict[str, Any]:
    config = {**options.config, **settings, "run_dir": str(Path(options.config["run_dir"]) / name)}
    one = worker.Options(config, options.result, options.iterations, fault, **engine)
    worker.seed()
    built, batches = worker.build(one, rank)
    faults = worker.Faults(one, rank)
    with CPSRRecovery(built, config, **worker.probe_arguments(one, built, batches)) as recovery:
        loop = worker.train_pipeline if one.stages else worker.train
        dealt = loop(recovery, built, batches, one, faults)
        result = {"batches": dealt} | worker.final_state(recovery, built)
    mock.patch.stopall()  # what the fault had put in place
    return result
