"""Puts states into the engine: a whole snapshot; from there to the failure emergency dumps, or a prediction."""

import copy
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cpsr.checkpoint.files import temporary_name
from cpsr.checkpoint.frozen_files import FrozenFiles
from cpsr.checkpoint.progress import Progress
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.tiers import Source
from cpsr.errors import RecoveryError
from cpsr.job import Job
from cpsr.journal import Beginning
from cpsr.ranks.exits import ranks_named
from cpsr.restart.choice import ATTEMPTS, Candidate
from cpsr.restart.experts import older_operators
from cpsr.restart.prediction import StatePrediction
from cpsr.restart.restored_state import Recomputes, Refusal, RefusedError, Restored
from cpsr.restart.sources import MemorySources
from cpsr.state.small_state import DataPosition, Scalars

__all__ = ["Attempts", "Injection"]

logger = logging.getLogger(__name__)


# Files in the run's directory: the checkpoint from which attempts raised an error, and the one after which lives
# continued from an emergency dump, each with a count.
FAILED_PREDICTION = "prediction-failed.json"
DUMPS = "departed.json"


class Attempts:
    """Attempts of one kind; only those from the newest checkpoint are counted."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def since(self, checkpoint_iteration: int) -> tuple[int, str]:
        """The number of attempts from this checkpoint, and the error recorded at the last one."""
        record = self._read()
        same = record.get("checkpoint_iteration") == checkpoint_iteration
        return (int(record.get("tries", 1)), str(record.get("error", ""))) if same else (0, "")

    def record(self, checkpoint_iteration: int, error: str) -> None:
        """Count one more attempt, on the rank that detects it.

        Raises:
            OSError: the file system refused.
        """
        before = self._read()
        same = before.get("checkpoint_iteration") == checkpoint_iteration
        tries = int(before.get("tries", 1)) if same else 0
        attempt = {"checkpoint_iteration": checkpoint_iteration, "error": error, "tries": tries + 1}
        written = temporary_name(self._path)
        written.write_text(json.dumps(attempt), encoding="ascii")
        written.replace(self._path)  # not forced to disk: a machine that crashes has no dump, and may try once more

    def _read(self) -> dict[str, Any]:
        try:
            record = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            logger.warning("%s cannot be read and is ignored: %s", self._path.name, error)
            return {}
        return record if isinstance(record, dict) else {}


class Injection:
    """Brings an engine to a snapshot, and from its checkpoint to the failure; every method is a collective.

    Attributes:
        failures: attempts to go on from the checkpoint that have raised an error.
        dumps: lives that have continued from an emergency dump.
    """

    def __init__(
        self, job: Job, memory: MemorySources, prediction: StatePrediction, frozen: FrozenFiles | None
    ) -> None:
        self._job, self._adapter = job, job.adapter
        self._memory = memory
        self._prediction = prediction
        self._frozen = frozen
        self.failures = Attempts(job.config.run_dir / FAILED_PREDICTION)
        self.dumps = Attempts(job.config.run_dir / DUMPS)

    # Whole snapshots

    def load_frozen(self, scalars: dict[str, Any]) -> None:
        """Give the engine the parameters outside the optimizer that go with a snapshot, or with an emergency dump.

        Those that had moved are in a dump. Of the others it has a hash, by which they are looked for in checkpoints.

        Raises:
            CheckpointError: neither it nor a checkpoint has them; the engine's are as they were.
        """
        if self._frozen is not None:
            self._frozen.bring(scalars.get("frozen", {}))

    def inject(self, snapshot: Snapshot) -> None:
        """Put a snapshot's tensors and the engine's scalars back, exactly.

        Raises:
            CheckpointError: as `load_frozen`; nothing was changed.
        """
        self.load_frozen(snapshot.scalars)
        self.put(snapshot)

    def put(self, snapshot: Snapshot) -> None:
        """The same, where the parameters outside the optimizer are already those of the snapshot."""
        live = dict(self._adapter.shard(to_fill=True).tensors())
        with torch.no_grad():
            for key, values in snapshot.shard.tensors():
                live[key].copy_(values)
        # A copy: schedulers keep their argument and change it in place.
        self._adapter.load_scalars(copy.deepcopy(snapshot.scalars["engine"]))
        self._adapter.push_down()

    def restore(
        self,
        snapshot: Snapshot,
        sources: tuple[Source, ...],
        checkpoint_iteration: int | None,
        failure_iteration: int | None,
        load_seconds: float,
    ) -> Restored:
        """Continue exactly at a snapshot, with what the predictor had learned by then.

        Args:
            snapshot: of this rank.
            sources: where each rank's snapshot comes from.
            checkpoint_iteration: c, the newest checkpoint on the disk; None without one.
            failure_iteration: f.
            load_seconds: wall time that loading has taken.

        Returns:
            How the life begins, without the reason, which the caller sets.
        """
        started = time.perf_counter()
        scalars = Scalars.from_tree(snapshot.scalars)
        self.inject(snapshot)
        try:
            if scalars.learned:
                self._prediction.predictor.load_state_dict(scalars.learned)
        except ValueError as error:  # another kind or version wrote it
            logger.warning("what the predictor had learned cannot be taken over (%s): it begins anew", error)
        return Restored(
            beginning=Beginning.EXACT,
            restored_iteration=snapshot.iteration,
            checkpoint_iteration=checkpoint_iteration,
            failure_iteration=failure_iteration,
            reason="",
            scalars=scalars,
            data=scalars.data,
            sources=sources,
            cumulative_learning_rate=scalars.cumulative_learning_rate,
            load_seconds=load_seconds,
            inject_seconds=time.perf_counter() - started,
        )

    # From the checkpoint to the failure

    def advance(
        self,
        exact: Restored,
        candidate: Candidate,
        snapshot: Snapshot,
        recomputed_iterations: int | None,
    ) -> Restored:
        """Continue from emergency dumps, or from a prediction.

        Args:
            exact: how the life would begin at the checkpoint, which the engine holds.
            candidate: the state near the failure.
            snapshot: this rank's part of the checkpoint.
            recomputed_iterations: as in `StatePrediction.attempt`.

        Raises:
            RecoveryError: the attempt failed on this rank, and others may wait for it.
            RefusedError: the state was refused, or the attempt failed on the only rank.
        """
        try:
            if candidate.dumped and self._job.group.rank == 0:
                self.dumps.record(snapshot.iteration, f"from iteration {candidate.iteration}")
            if candidate.lost_ranks == 0:
                return self._load_dump(exact, candidate.parts)
            lineages: list[Any] = []
            prediction = self._prediction.attempt(
                exact,
                candidate.iteration,
                (lambda: self._load_part(candidate.parts, lineages)) if candidate.dumped else None,
                recomputed_iterations=recomputed_iterations,
                lost_here=candidate.parts[self._job.group.rank].tier == "predicted",
            )
        except RefusedError:
            raise
        except Exception as error:  # any error: the checkpoint is whole, and the run must restart
            raise RefusedError(self._failed(snapshot.iteration, error)) from error
        predicted = replace(prediction, sources=candidate.parts, taken_at=older_operators(snapshot))
        if not candidate.dumped:
            return predicted
        assert exact.scalars is not None
        scalars = replace(exact.scalars, lineage=lineages[0])
        return replace(predicted, reason=f"{_summary(candidate.parts)}; {prediction.reason}", scalars=scalars)

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
            known |= progress.ranks[self._job.group.rank]
        nearest = min(known, key=lambda one: abs(one - iteration))
        if not known[nearest]:  # this rank is dealt no batches
            return exact.data
        since = (iteration - nearest) * self._adapter.micro_batches_per_iteration
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
        loss_checkpoint = self._prediction.probe_loss(exact.scalars.probes)
        self._memory.fetch(sources)
        left = self._memory.load(sources[self._job.group.rank], self._adapter.shard(to_fill=True))
        self.load_frozen(left)
        self._adapter.load_scalars(left["engine"])
        self._adapter.push_down()
        guard: dict[str, Any] = {}
        accepted, reason = False, "some values are not finite"
        if self._prediction.finite():
            accepted, reason = self._prediction.judge(exact.scalars, loss_checkpoint, guard, "what was left")
        if not accepted:
            why = f"what the ranks left when the group broke was refused: {reason}"
            raise RefusedError(Refusal(Recomputes.DUMP_REFUSED, why, guard=guard))
        at, small = sources[0].iteration, {name: left[name] for name in ("lineage", "peak_learning_rate")}
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

    def _load_part(self, sources: tuple[Source, ...], lineages: list[Any]) -> bool:
        """Load this rank's emergency dump into the engine; False where there is none.

        The lineage that every rank's state had is added to `lineages`.
        """
        group, own = self._job.group, sources[self._job.group.rank]
        self._memory.fetch(sources)
        left = self._memory.load(own, self._adapter.shard(to_fill=True))
        if left is not None:
            self.load_frozen(left)
        lineages += group.gather_present(None if left is None else left["lineage"])
        return own.entry is not None


def _summary(sources: Sequence[Source]) -> str:
    """Which ranks use which source, as text: `ranks 0 to 3: departure, rank 4: predicted`."""
    tiers = sorted({source.tier for source in sources})
    ranks = {tier: ranks_named(source.rank for source in sources if source.tier == tier) for tier in tiers}
    return ", ".join(f"{named}: {tier}" for tier, named in ranks.items())
