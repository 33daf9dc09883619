"""What the first batches of a life tell: whether ranks are dealt different ones, and how many a step takes."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import torch
import xxhash

from cpsr.engines import EngineAdapter
from cpsr.group import Group

__all__ = ["FirstBatches"]

logger = logging.getLogger(__name__)

# Equal on two ranks and unlike each other: less could be chance in a tiny data set, or data that is always the same.
COMPARED = 3


class FirstBatches:
    """Looks at them after the third step of a life, and never again.

    Batches are copied to the host for their hash. Where the loader deals them on a GPU that waits for the GPU, for each
    of the three once in a life.

    Args:
        adapter: says which ranks are to see different batches, and how many a step takes.
        group: all ranks.
        predicts: whether a restart may go on where no checkpoint is, and so has to know how many a step takes.
            Elsewhere the data position has to be that of the loop, and batches that are fetched ahead are warned of.
        tell: records an event: its kind, one sentence, the iteration and the level of logging.
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        group: Group,
        predicts: bool,
        tell: Callable[[str, str, int | None, int], None],
    ) -> None:
        self._adapter = adapter
        self._group = group
        self._predicts = predicts
        self._tell = tell
        self._digests: list[str | None] = []
        self._dealt = 0  # since the last step
        self._per_step: list[int] = []
        self._thread = threading.get_ident()
        self._other_thread = False

    def on_batch(self, batch: Any) -> None:
        """A batch is about to be dealt."""
        self._dealt += 1
        if len(self._per_step) < COMPARED:
            self._other_thread |= threading.get_ident() != self._thread
        if self._group.size > 1 and len(self._digests) < COMPARED:
            self._digests.append(_digest(batch))

    def after_step(self) -> None:
        """A step is complete; once in a life a collective."""
        if len(self._per_step) == COMPARED:
            return
        self._per_step.append(self._dealt)
        self._dealt = 0
        if len(self._per_step) < COMPARED:
            return
        self._check_per_step()
        self._check_ahead()
        if self._group.size > 1:
            self._compare()

    def _check_per_step(self) -> None:
        told, taken = self._adapter.micro_batches_per_iteration, self._per_step[0]
        steady = taken > 0 and self._per_step == [taken] * COMPARED
        if self._predicts and self._group.rank == 0 and steady and taken != told:
            self._tell(
                "batches per step",
                f"the loop takes {taken} batches for each optimizer step, and CPSR was told {told}: a restart near the "
                "failure would go on at the wrong batch. TorchAdapter(model, optimizer, scheduler, "
                f"micro_batches_per_iteration={taken})",
                self._adapter.iteration,
                logging.WARNING,
            )

    def _check_ahead(self) -> None:
        ahead = self._per_step[0] > self._per_step[1] == self._per_step[2] > 0
        if self._predicts or self._group.rank or not (ahead or self._other_thread):
            return
        how = "by another thread" if self._other_thread else f"({self._per_step[0]} before the first step)"
        self._tell(
            "batches ahead",
            f"the loop takes batches before it trains on them {how}: a restart goes on after the last batch that was "
            "taken, and those in between are never trained on. Iterate over recovery.resume(loader) in the training "
            "loop itself, and leave fetching ahead to the DataLoader: num_workers=..., prefetch_factor=...",
            self._adapter.iteration,
            logging.WARNING,
        )

    def _compare(self) -> None:
        told = self._group.gather([sorted(self._adapter.data_parallel_ranks), self._digests[:COMPARED]])
        same = _same(told)
        if same and self._group.rank == 0:
            ranks = " and ".join(map(str, same))
            self._tell(
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


def _same(told: list[Any]) -> list[int]:
    """Ranks of one data-parallel group that were dealt the same, none of it twice; empty where there are none."""
    dealt: dict[tuple[Any, ...], list[int]] = {}
    for rank, (ranks, digests) in enumerate(told):
        if None not in digests and len(digests) == len(set(digests)) == COMPARED:
            dealt.setdefault((tuple(ranks), tuple(digests)), []).append(rank)
    return next((ranks for ranks in dealt.values() if len(ranks) > 1), [])


def _digest(batch: Any) -> str | None:
    """Hash of a batch's tensors, arrays and strings; None where it has none, or cannot be read."""
    hashed, count = xxhash.xxh3_128(), 0
    try:
        for count, leaf in enumerate(_leaves(batch), 1):  # noqa: B007 - read after the loop
            hashed.update(leaf)
    except Exception:  # whatever a user's batch raises, training needs no hash of it, and ranks are not compared
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
