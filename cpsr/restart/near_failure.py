"""From the checkpoint to the failure: emergency dumps, and a prediction of the ranks without one."""

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cpsr.checkpoint.files import write_bytes
from cpsr.checkpoint.progress import Progress
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.tiers import Source
from cpsr.errors import RecoveryError
from cpsr.job import Job
from cpsr.journal import Beginning
from cpsr.ranks.exits import ranks_named
from cpsr.ranks.group import Group
from cpsr.restart.choice import ATTEMPTS, Candidate
from cpsr.restart.engine_state import EngineState
from cpsr.restart.experts import older_operators
from cpsr.restart.prediction import PredictionSettings, StatePrediction
from cpsr.restart.restored import Recomputes, Refusal, RefusedError, Restored
from cpsr.restart.sources import MemorySources
from cpsr.state.scalars import DataPosition

__all__ = ["Attempts", "NearFailure"]

logger = logging.getLogger(__name__)


# Files in the run's directory: the checkpoint from which attempts raised an error, and the one after which lives
# continued from an emergency dump, each with a count.
FAILED_PREDICTION = "prediction-failed.json"
DUMPS = "departed.json"


class Attempts:
    """Attempts of one kind; only those from the newest checkpoint are counted."""

    def __init__(self, path: Path, group: Group) -> None:
        self._path = path
        self._group = group

    def since(self, checkpoint_iteration: int) -> tuple[int, str]:
        """The number of attempts from this checkpoint, and the error recorded at the last one; a collective."""
        record = self._group.broadcast(self._read() if self._group.rank == 0 else None)
        same = record.get("checkpoint_iteration") == checkpoint_iteration
        return (int(record.get("tries", 1)), str(record.get("error", ""))) if same else (0, "")

    def record(self, checkpoint_iteration: int, error: str) -> None:
        """Count one more attempt, on the rank that detects it.

        Raises:
            OSError: the file system refused.
        """
        before = self._read()
        same = before.get("checkpoint_iteration") == checkpoint_iteration
        attempt = {
            "checkpoint_iteration": checkpoint_iteration,
            "rank": self._group.rank,
            "error": error,
            "tries": int(before.get("tries", 1)) + 1 if same else 1,
        }
        write_bytes(self._path, json.dumps(attempt).encode("ascii"))

    def _read(self) -> dict[str, Any]:
        try:
            record = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            logger.warning("%s cannot be read and is ignored: %s", self._path.name, error)
            return {}
        return record if isinstance(record, dict) else {}


class NearFailure:
    """Advances an engine from its exact checkpoint to the failure; every method is a collective.

    Attributes:
        failures: attempts that have raised an error.
        dumps: lives that have continued from an emergency dump.
    """

    def __init__(self, job: Job, memory: MemorySources, prediction: StatePrediction, engine: EngineState) -> None:
        self._job = job
        self._engine = engine
        self._memory = memory
        self._prediction = prediction
        self.failures = Attempts(job.config.run_dir / FAILED_PREDICTION, job.group)
        self.dumps = Attempts(job.config.run_dir / DUMPS, job.group)

    def advance(
        self, exact: Restored, candidate: Candidate, snapshot: Snapshot, settings: PredictionSettings
    ) -> Restored:
        """Continue from emergency dumps, or from a prediction.

        Args:
            exact: how the life would begin at the checkpoint, which the engine holds.
            candidate: the state near the failure.
            snapshot: this rank's part of the checkpoint.
            settings: of a prediction.

        Raises:
            RecoveryError: the attempt failed on this rank, and others may wait for it.
            RefusedError: the state was refused, or the attempt failed on the only rank.
        """
        try:
            if candidate.dumped and self._job.group.rank == 0:
                self.dumps.record(snapshot.iteration, f"from iteration {candidate.iteration}")
            if candidate.lost_ranks == 0:
                return self._load_dump(exact, candidate.parts)
            return self._predict(exact, candidate.parts, snapshot, settings)
        except RefusedError:
            raise
        except Exception as error:  # any error: the checkpoint is whole, and the run must restart
            raise RefusedError(self._failed(snapshot.iteration, error)) from error

    def data_at(self, exact: Restored, progress: Progress | None, iteration: int) -> DataPosition:
        """This rank's position in the data at an iteration.

        As it was published; else counted, at the usual number of batches a step, from the nearest iteration that was:
        the failure may lie after what this rank published, or before.

        Args:
            exact: how the life would begin at the checkpoint.
            progress: the ranks' counters.
            iteration: after the checkpoint.
        """
        known = {exact.restored_iteration: exact.data.batches}
        if progress is not None and self._job.group.rank in progress.ranks:
            known |= progress.ranks[self._job.group.rank].slots
        nearest = min(known, key=lambda one: abs(one - iteration))
        if not known[nearest]:  # this rank is dealt no batches
            return exact.data
        since = (iteration - nearest) * self._job.adapter.micro_batches_per_iteration
        return exact.data.advanced(max(known[nearest] + since - exact.data.batches, 0))

    def _failed(self, checkpoint_iteration: int, error: Exception) -> Refusal:
        """Record an attempt that raised: refused on a single rank, else the job ends and starts again."""
        message = f"{type(error).__name__}: {error}"
        self.failures.record(checkpoint_iteration, message)
        if self._job.group.size > 1:
            raise RecoveryError(
                f"predicting the state failed on rank {self._job.group.rank} ({message}); checkpoint "
                f"{checkpoint_iteration} is untouched, and where it fails {ATTEMPTS} times it is restored as it is: "
                "start the job again"
            ) from error
        logger.error("predicting the state failed; a whole state is restored", exc_info=error)
        return Refusal(Recomputes.FAILED, f"predicting the state failed ({message})")

    def _load_dump(self, exact: Restored, sources: tuple[Source, ...]) -> Restored:
        """Every rank's dumped tensors, if they are finite and their loss is not far above the checkpoint's.

        Raises:
            CheckpointError: a rank's tensors cannot be read; every rank raises it.
            RefusedError: they are not finite, or the guard refuses them.
        """
        started = time.perf_counter()
        assert exact.scalars is not None
        adapter, at = self._job.adapter, sources[0].iteration
        loss_checkpoint = self._prediction.probe_loss(exact.scalars.probes)
        self._memory.fetch(sources)
        left = self._memory.load(sources[self._job.group.rank], adapter.shard(to_fill=True))
        self._engine.load_frozen(left)
        adapter.load_scalars(left["engine"])
        adapter.push_down()
        guard: dict[str, Any] = {}
        accepted, reason = False, "some values are not finite"
        if self._prediction.finite():
            accepted, reason = self._prediction.judge(exact.scalars, loss_checkpoint, guard, "what was left")
        if not accepted:
            why = f"what the ranks left when the group broke was refused: {reason}"
            raise RefusedError(Refusal(Recomputes.DUMP_REFUSED, why, guard=guard))
        small = {name: left[name] for name in ("lineage", "peak_learning_rate")}
        return replace(
            exact,
            beginning=Beginning.EMERGENCY_DUMP,
            restored_iteration=at,
            reason=f"every rank's state was left at iteration {at} when the group broke; random states and registered "
            f"objects are those of checkpoint {exact.checkpoint_iteration}; {reason}",
            scalars=replace(exact.scalars, **small),
            guard=guard,
            sources=sources,
            cumulative_learning_rate=left["cumulative_learning_rate"],
            inject_seconds=exact.inject_seconds + time.perf_counter() - started,
        )

    def _predict(
        self,
        exact: Restored,
        sources: tuple[Source, ...],
        snapshot: Snapshot,
        settings: PredictionSettings,
    ) -> Restored:
        """Predict the state of the ranks without an emergency dump.

        Raises:
            RefusedError: nothing can be predicted, it would cost more than recomputing, or the guard refuses it.
        """
        assert exact.scalars is not None
        dumped = any(source.tier == "departure" for source in sources)
        lineages: list[Any] = []
        prediction = self._prediction.attempt(
            exact.scalars,
            sources[0].iteration,
            settings,
            (lambda: self._load_part(sources, lineages)) if dumped else None,
        )
        return replace(
            exact,
            beginning=Beginning.PREDICTED,
            restored_iteration=sources[0].iteration,
            reason=f"{_summary(sources)}; {prediction.reason}" if dumped else prediction.reason,
            scalars=replace(exact.scalars, lineage=lineages[0]) if lineages else exact.scalars,
            forecast=prediction.forecast,
            guard=prediction.guard,
            sources=sources,
            cumulative_learning_rate=prediction.target.time,
            taken_at=older_operators(snapshot),
            predict_seconds=prediction.predict_seconds,
            inject_seconds=exact.inject_seconds + prediction.inject_seconds,
        )

    def _load_part(self, sources: tuple[Source, ...], lineages: list[Any]) -> bool:
        """Load this rank's emergency dump into the engine; False where there is none.

        The lineage that every rank's state had is added to `lineages`.
        """
        group, own = self._job.group, sources[self._job.group.rank]
        self._memory.fetch(sources)
        left = self._memory.load(own, self._job.adapter.shard(to_fill=True))
        if left is not None:
            self._engine.load_frozen(left)
        lineages += [one for one in group.gather(None if left is None else left["lineage"]) if one is not None]
        return own.entry is not None


def _summary(sources: Sequence[Source]) -> str:
    """Which ranks use which source, as text: `ranks 0 to 3: departure, rank 4: predicted`."""
    tiers = sorted({source.tier for source in sources})
    ranks = {tier: ranks_named(source.rank for source in sources if source.tier == tier) for tier in tiers}
    return ", ".join(f"{named}: {tier}" for tier, named in ranks.items())
