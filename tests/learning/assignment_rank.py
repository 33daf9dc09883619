"""One of two gloo ranks that hold the same weights and share what is learned of them, beside one that learns alone."""

import json
import math
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cpsr.checkpoint.history import DiskHistory
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore
from cpsr.learning.assignment import OperatorAssignment
from cpsr.learning.exchange import Exchange
from cpsr.predictor import ranks
from cpsr.predictor.protocol import Target
from cpsr.predictor.vitp import VITPPredictor
from cpsr.ranks.group import Group
from cpsr.state.shard import OperatorState, ParamSlice, Shard

INTERVAL, COUNT = 50, 11
LEFT = 6  # checkpoints that rank 1 takes in where it lags
SCENARIOS = ("even", "lagging", "not finite")
SIZES = {"embedding": 900, "attention": 300, "first": 250, "second": 250, "bias": 20}
SETTINGS: dict[str, Any] = {"window_iterations": 300, "gain": 1.0, "direction": "vitp"}
COMMIT_SECONDS = 20.0


def main() -> None:
    """Argument: where the findings go, by scenario."""
    found = Path(sys.argv[1])
    dist.init_process_group("gloo")
    group = Group()
    findings = {scenario: Ranks(found.with_name(scenario), scenario, group).run() for scenario in SCENARIOS}
    group.close()
    found.with_name(f"{found.name}.{group.rank}").write_text(json.dumps(findings))
    dist.destroy_process_group()


class Ranks:
    """The predictors of this rank: one that shares and, on rank 0, one that learns everything by itself."""

    def __init__(self, run_dir: Path, scenario: str, group: Group) -> None:
        self.scenario, self.group = scenario, group
        self.exchange, self.assignment = Exchange(), OperatorAssignment()
        self.exchange.open(self.group)
        self.store = CheckpointStore(run_dir, self.group.rank, 2, "run", 1, fsync=False)
        if self.group.rank == 0:
            self.store.prepare()
        self.group.barrier()
        self.assignment.open(self.group, weights(0), [0, 1], self.store.directory)
        self.shared, self.alone = self.sharer(), VITPPredictor(**SETTINGS)

    def sharer(self) -> VITPPredictor:
        return VITPPredictor(
            **SETTINGS,
            ranks=ranks.Ranks(
                self.exchange.agree,
                self.exchange.reduce,
                self.exchange.broadcast,
                trains=self.group.rank == 0,
                share=self.assignment,
            ),
        )

    def run(self) -> dict[str, Any]:
        heads = []
        for place in range(COUNT):
            self.save(place)
            self.learn(place)
            heads.append([head(self.shared), head(self.alone)])
        statistics = self.shared.state_dict()["vitp"]["statistics"]
        findings = {
            "heads": heads,
            "learned": sorted(statistics["operators"]),
            "learned alone": sorted(self.alone.state_dict()["vitp"]["statistics"]["operators"]),
            "forecasts": self.forecasts(self.shared),
            "accuracy": [self.shared.accuracy(), self.alone.accuracy()],
        }
        # A restart from what was saved, where rank 1's part is lost.
        again = self.sharer()
        if self.group.rank == 0:
            again.load_state_dict(self.shared.state_dict())
        findings["after a loss"] = self.forecasts(again)
        return findings

    def save(self, place: int) -> None:
        """One checkpoint of both ranks, with what was learned before it."""
        iteration, shard = INTERVAL * place, weights(place)
        if self.scenario == "not finite" and place == COUNT - 4:
            shard.operators["embedding"].parameter.values[7] = math.nan
        scalars = {"cumulative_learning_rate": float(iteration), "learning_rate": 1.0, "origin": "trained"}
        self.store.write(Snapshot(iteration, shard, scalars | {"learned": self.shared.state_dict()}))
        if self.group.rank == 0:
            assert self.store.commit(iteration, COMMIT_SECONDS, threading.Event()).committed
        self.group.barrier()

    def learn(self, place: int) -> None:
        stopped = self.scenario == "lagging" and self.group.rank == 1 and place >= LEFT
        predictors = [] if stopped else [self.shared]
        if self.group.rank == 0:
            predictors.append(self.alone)
        history = self.history(place)
        for predictor in predictors:
            for _ in predictor.learn(history):
                pass
        history.close()

    def history(self, place: int) -> DiskHistory:
        return DiskHistory(self.store.directory, self.group.rank, before=INTERVAL * place + 1)

    def forecasts(self, predictor: VITPPredictor) -> list[Any]:
        """Coefficients of the one that shares and, on rank 0, of the other with the same network."""
        history = self.history(COUNT - 1)
        newest = history.entries[-1]
        target = Target(newest.iteration + 40, newest.time + 40, 1.0)
        found = [predictor.forecast(history, target)]
        if self.group.rank == 0:
            state = self.alone.state_dict()
            state["vitp"]["head"] = predictor.state_dict()["vitp"]["head"]
            alone = VITPPredictor(**SETTINGS)
            alone.load_state_dict(state)
            found.append(alone.forecast(history, target))
        history.close()
        return [[one.coefficients, one.settings["line_operators"]] for one in found]


def weights(place: int) -> Shard:
    """A slow motion that turns, with some noise, in every operator; the same on every rank."""
    noise = torch.Generator().manual_seed(1000 + place)
    operators = {}
    for name, size in SIZES.items():
        plane = torch.randn(2, size, generator=torch.Generator().manual_seed(size + len(name)), dtype=torch.float64)
        angle = 0.25 * place + len(name)
        values = math.cos(angle) * plane[0] + math.sin(angle) * plane[1]
        values += 0.1 * torch.randn(size, generator=noise, dtype=torch.float64)
        operators[name] = OperatorState(name, ParamSlice(values.float(), (size,)), {}, INTERVAL * place)
    return Shard(operators)


def head(predictor: VITPPredictor) -> list[Any]:
    state = predictor.state_dict()["vitp"]["head"]
    return [0, ""] if state is None else [state["steps"], state["parameters"].numpy().tobytes().hex()]
