"""Checks of the first batches of a life: whether ranks get different ones, and how many a step takes."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import torch
import xxhash

from cpsr.engines import EngineAdapter
from cpsr.ranks.group import Group

__all__ = ["FirstBatches"]

logger = logging.getLogger(__name__)

# Equal on two ranks and different from each other: fewer could be chance in a tiny or constant data set.
COMPARED = 3
_PREPARE = (
    "as a learning-rate finder does, take them before the run is opened: CPSR counts them as steps of the training, "
    "and a restarted script would take them again, on the restored weights"
)
NONE_YET = (
    "no batch came from recovery.resume in the first {}. If these steps train, checkpoints hold no position in the "
    "data: after a restart the script begins its data anew, and batches drawn ahead of a step are drawn from other "
    "random numbers. Take the batches from recovery.resume(loader), or from recovery.resume(get_batch) where a "
    f"function draws them at random. If these steps prepare the training, {_PREPARE}"
)
STEPS_BEFORE = (
    "this life has taken {} before its first batch from recovery.resume. If these steps train, take their batches from "
    f"recovery.resume, too. If they prepare the training, {_PREPARE}"
)


class FirstBatches:
    """Checks the batches after the third step of a life, once.

    Batches are copied to the host for their hash. If the loader yields them on a GPU, each of the three waits for the
    GPU, once in a life.

    Args:
        adapter: defines which ranks need different batches, and how many a step takes.
        group: all ranks.
        predicts: whether a restart may continue without a checkpoint at its iteration, and so needs the batches per
            step. Otherwise batches that another thread takes, or that do not come from `resume`, cause a warning.
        report: records an event: its kind, one sentence, the iteration and the logging level.
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        group: Group,
        predicts: bool,
        report: Callable[[str, str, int | None, int], None],
    ) -> None:
        self._adapter = adapter
        self._group = group
        self._predicts = predicts
        self._report = report
        self._digests: list[str | None] = []
        self._dealt = 0  # since the last step
        self._any = False
        self._steps = 0  # before the first batch
        self._per_step: list[int] = []
        self._thread = threading.get_ident()
        self._other_thread = False
        self._told = self._waited = False

    def on_batch(self, batch: Any) -> None:
        """A batch is about to be returned."""
        if self._steps and not self._any:
            self._tell_without_batches(STEPS_BEFORE)
        self._any = True
        self._dealt += 1
        if len(self._per_step) < COMPARED:
            self._other_thread |= threading.get_ident() != self._thread
        if self._group.size > 1 and len(self._digests) < COMPARED:
            self._digests.append(_digest(batch))

    def after_step(self) -> None:
        """A step is complete; once in a life a collective."""
        self._steps += not self._any
        if len(self._per_step) == COMPARED:
            return
        self._per_step.append(self._dealt)
        self._dealt = 0
        if len(self._per_step) < COMPARED:
            return
        self._check_per_step()
        self._check_thread()
        if self._group.size > 1:
            self._compare()

    def _check_per_step(self) -> None:
        configured, taken = self._adapter.micro_batches_per_iteration, self._per_step[0]
        steady = taken > 0 and self._per_step == [taken] * COMPARED
        if self._predicts and self._group.rank == 0 and steady and taken != configured:
            self._report(
                "batches per step",
                f"the loop takes {taken} batches for each optimizer step, and CPSR expects {configured}: a restart "
                "near the failure would continue at the wrong batch. TorchAdapter(model, optimizer, scheduler, "
                f"micro_batches_per_iteration={taken})",
                self._adapter.iteration,
                logging.WARNING,
            )
        if self._predicts and self._group.rank == 0 and self._per_step[1] != self._per_step[2]:
            self._report(
                "batches per step",
                f"the loop takes {', '.join(map(str, self._per_step))} batches for its first steps, and CPSR expects "
                f"{configured} for each: a restart near the failure would continue at the wrong batch. Set mode: exact",
                self._adapter.iteration,
                logging.WARNING,
            )

    def _check_thread(self) -> None:
        if self._predicts or self._group.rank or not self._other_thread:
            return
        self._report(
            "batches ahead",
            "another thread takes the batches: a restart goes on after the last batch that was taken, and those that "
            "wait for the training thread are never trained on. Iterate over recovery.resume(loader) in the training "
            "loop itself, and leave fetching ahead to the DataLoader: num_workers=..., prefetch_factor=...",
            self._adapter.iteration,
            logging.WARNING,
        )

    def at_checkpoint(self) -> None:
        """A checkpoint begins; of the first one in mode exact it is said if it has no position in the data."""
        if not self._any:
            self._tell_without_batches(NONE_YET)

    def _tell_without_batches(self, message: str) -> None:
        told, self._told = self._told, True
        if not (told or self._predicts or self._group.rank or self._adapter.pipeline_stage is not None):
            steps = message.format(f"{self._steps} step{'s' * (self._steps > 1)}")
            self._report("no batches from resume", steps, self._adapter.iteration, logging.WARNING)

    def waits_for_batch(self, *, due: bool) -> None:
        """A save waits until the loop takes its next batch, for a whole interval if one more is `due`; said once."""
        if not due or self._waited or self._group.rank:
            return
        self._waited = True
        self._report(
            "steps on one batch",
            "the loop takes more steps on one batch than there are between two checkpoints. CPSR saves when the loop "
            "takes its next batch, since no position in the data lies between: until then a failure loses all of them",
            self._adapter.iteration,
            logging.WARNING,
        )

    def _compare(self) -> None:
        gathered = self._group.gather([sorted(self._adapter.data_parallel_ranks), self._digests[:COMPARED]])
        same = _same(gathered)
        if same and self._group.rank == 0:
            ranks = " and ".join(map(str, same))
            self._report(
                "same batches",
                f"ranks {ranks} train on the same batches: the first {COMPARED} of this life are equal. Each of them "
                "reads all of the data, so that together they learn no more than one, unless your loop splits each "
                "batch over the ranks itself. Use "
                "DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset)) without shuffle=True. Where you "
                "loop over passes yourself, call sampler.set_epoch(epoch); recovery.resume(loader, epochs=...) does it "
                "for you",
                self._adapter.iteration,
                logging.WARNING,
            )


def _same(gathered: list[Any]) -> list[int]:
    """Ranks of one data-parallel group with equal batches, none repeated; empty if there are none."""
    dealt: dict[tuple[Any, ...], list[int]] = {}
    for rank, (ranks, digests) in enumerate(gathered):
        if None not in digests and len(digests) == len(set(digests)) == COMPARED:
            dealt.setdefault((tuple(ranks), tuple(digests)), []).append(rank)
    return next((ranks for ranks in dealt.values() if len(ranks) > 1), [])


def _digest(batch: Any) -> str | None:
    """Hash of a batch's tensors, arrays and strings; None if it has none, or cannot be read."""
    hashed, count = xxhash.xxh3_128(), 0
    try:
        for count, leaf in enumerate(_leaves(batch), 1):  # noqa: B007 - read after the loop
            hashed.update(leaf)
    except Exception:  # after any error of a user's batch training goes on, and ranks are not compared
        logger.debug("a batch of type %s cannot be hashed", type(batch).__name__, exc_info=True)
        return None
    return hashed.hexdigest() if count else None


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, torch.Tensor):
        if batch.layout == torch.strided and not batch.is_nested and batch.numel():
            yield f"{batch.dtype}{tuple(batch.shape)}".encode()
            yield batch.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    elif isinstance(batch, numpy.ndarray):
        yield numpy.ascontiguousarray(batch) if batch.dtype.kind in "biufc" else b""
    elif isinstance(batch, str):
        yield batch.encode()
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _leaves(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _leaves(value)
