"""One training from beginning to end in one way, of which the final losses are kept as a file."""

import inspect
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cpsr.benchmarks.boost.way import Way
from cpsr.benchmarks.harness.files import read_json, write_json
from cpsr.benchmarks.recovery.ending import Ended, Training, judged
from cpsr.benchmarks.recovery.sources import files_digest, predictor_files

__all__ = ["Outcome", "Trial", "outcome"]


@dataclass(frozen=True)
class Outcome:
    """What became of a trial.

    Attributes:
        ended: by its own weights.
        averages: by averages of its weights: name -> final loss in nats, None where that is not finite.
    """

    ended: Ended
    averages: dict[str, float | None]


@dataclass(frozen=True)
class Trial:
    """A training and what is done beside its optimizer; plain enough to be sent to another process."""

    training: Training
    way: Way

    def outcome(self) -> Outcome:
        """Train, or read what was kept."""
        training, way = self.training, self.way
        source = files_digest(predictor_files(Path(inspect.getfile(type(way)))), way.name)
        path = training.cache / f"{training.workload.name}-{way.name}-seed{training.seed}-{training.key()}{source}.json"
        kept = read_json(path)
        if kept is None:
            kept = asdict(self._train())
            write_json(path, kept)
        return Outcome(Ended(**kept["ended"]), kept["averages"])

    def _train(self) -> Outcome:
        started = time.perf_counter()
        trainer = self.training.trainer()
        course = self.way.begin(trainer, self.training.workload, self.training.seed)
        finite = self.training.train(trainer, course.after_step)
        ended = judged(trainer.final_losses() if finite else None, time.perf_counter() - started)
        averages: dict[str, float | None] = {}
        if ended.loss is not None:
            state = trainer.state()
            for name, weights in course.averages().items():
                trainer.load(replace(state, weights=weights))
                averages[name] = judged(trainer.final_losses(), 0.0).loss
        return Outcome(ended, averages)


def outcome(trial: Trial) -> Outcome:
    """For processes of their own, which import a function."""
    return trial.outcome()
