"""Witnesses: what a rank saw in each of its newest steps, to compare a repeated step with its first execution.

A witness holds the batch position, the learning rates, the loss, and about a hundred sampled elements of the weights
right after the update. What the loop changes after `optimizer.step()` shows in the witness of the next step. Both
executions of a step sample the same elements at the same place.

The witnesses of a rank lie in one mapped file, `<run_dir>/witnesses/rank-00000`. It survives the process and a clean
end. Another program reads it like this::

    for witness in read_witnesses(run_dir, rank=0):     # oldest first, the last execution of each step
        print(witness.iteration, witness.life, witness.loss)
    found = difference(first, again)                    # two executions of one step; None: they are equal
"""

import contextlib
import math
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy
import xxhash

__all__ = [
    "ARITHMETIC",
    "CHECKED",
    "NOT_RESTORED",
    "Difference",
    "SampledBytes",
    "What",
    "Witness",
    "Witnesses",
    "difference",
    "read_witnesses",
    "witness_path",
]

# Kinds of the events in which a check of repeated steps ends: equal, different by rounding, different.
CHECKED = "checked"
ARITHMETIC = "arithmetic"
NOT_RESTORED = "not restored"

STEPS = 4096  # per rank; of older steps no witness is left
RECORD_BYTES = 512
SAMPLE_BYTES = 384
RATES = 4  # learning rates that are kept as numbers; a hash covers those of further parameter groups
_HAS_LOSS = 1
# Checksum, iteration, life, flags, trajectory, epoch, batch, batches, epsilon, loss, rates, hash of the other rates,
# number of rates, number of sampled elements of each dtype, and these elements.
_RECORD = struct.Struct(f"<QQIIQQQQdd{RATES}dQ5B11x{SAMPLE_BYTES}s")
_CHECKSUM = struct.Struct("<Q")
_NO_RATES = (0.0,) * RATES
# A loss keeps more than half of its digits in another order of additions, and a gradient, in which larger terms cancel,
# about half of them. So these are multiples of the square root of the dtype's epsilon.
LOSS_SHARE = 1 / 32  # of the loss
UPDATE_SHARE = 4.0  # of the update of a weight
UNKNOWN_UPDATE = 0.01  # of the weight, where no witness of the step before tells its update
ROUNDED_ULPS = 2.0  # of the weight itself


class SampledBytes(NamedTuple):
    """Sampled elements of the weights: float64, float32, bfloat16 and float16 in this order, and how many of each."""

    content: bytes
    counts: tuple[int, int, int, int]

    def numbers(self) -> "numpy.ndarray[tuple[int], numpy.dtype[numpy.float64]]":
        """The elements as float64."""
        found, at = [], 0
        for count, (size, dtype) in zip(self.counts, ((8, "<f8"), (4, "<f4"), (2, "bf16"), (2, "<f2")), strict=True):
            part = self.content[at : at + count * size]
            at += count * size
            if dtype == "bf16":
                values = (numpy.frombuffer(part, "<u2").astype("<u4") << 16).view("<f4")
            else:
                values = numpy.frombuffer(part, dtype)
            found.append(values.astype(numpy.float64))
        return numpy.concatenate(found)

    def epsilons(self) -> "numpy.ndarray[tuple[int], numpy.dtype[numpy.float64]]":
        """The machine epsilon of each element's dtype."""
        return numpy.repeat([2.0**-52, 2.0**-23, 2.0**-7, 2.0**-10], self.counts)


class Witness(NamedTuple):
    """What one rank saw in one step.

    Attributes:
        iteration: the step.
        life: the life of the run that executed it.
        trajectory: equal where two executions should be equal: it changes with the number of ranks, with every
            predicted state, and with every state that the user loads.
        epoch: pass over the data after the step.
        batch: batches used in this pass.
        batches: batches used since the start of the run.
        learning_rates: of the update, by parameter group; the first `RATES`.
        other_rates: hash of the learning rates of further groups.
        loss: mean over this rank's micro-batches in nats; None if no loss was seen.
        weights: sampled elements after the update.
        epsilon: machine epsilon of the least precise dtype that forward and backward compute in.
    """

    iteration: int
    life: int
    trajectory: int
    epoch: int
    batch: int
    batches: int
    learning_rates: tuple[float, ...]
    other_rates: int
    loss: float | None
    weights: SampledBytes
    epsilon: float

    @property
    def weights_hash(self) -> int:
        """xxh3-64 of the sampled elements."""
        return xxhash.xxh3_64_intdigest(self.weights.content)


What = Literal["batch position", "learning rate", "loss", "weights"]


@dataclass(frozen=True)
class Difference:
    """What differs first between two executions of a step.

    Attributes:
        iteration: the step.
        what: that differs first, in the order in which a step uses it.
        first: what the first execution had; for weights the hash.
        again: what the repeated one had.
        amount: relative difference of the learning rate or the loss; for weights the median over the sampled elements
            that differ; for a batch position the number of batches.
        rounding: whether another order of additions explains it.
        elements: indexes of the sampled elements that differ, if the weights do.
        loss_is_known: whether the losses were compared.
    """

    iteration: int
    what: What
    first: str
    again: str
    amount: float
    rounding: bool
    elements: tuple[int, ...] = ()
    loss_is_known: bool = False

    @property
    def differs(self) -> str:
        """As in "the loss differs", for sentences."""
        return f"the {self.what} {'differ' if self.what == 'weights' else 'differs'}"


def difference(first: Witness, again: Witness, before: Witness | None = None, slack: float = 1.0) -> Difference | None:
    """What differs first between two executions of one step; None if nothing does.

    A loss that one of them lacks is not compared, nor are samples of different elements.

    Args:
        first: the first execution.
        again: the repeated one.
        before: the step before in the first execution: the size of the update then tells rounding from errors better.
        slack: factor on what counts as rounding: in steps after one that was rounded differently, differences grow.

    Raises:
        ValueError: they are witnesses of two steps.
    """
    if first.iteration != again.iteration:
        raise ValueError(f"cannot compare step {first.iteration} with step {again.iteration}")
    step = first.iteration
    then, now = _position(first), _position(again)
    if then != now:
        return Difference(step, "batch position", then, now, float(abs(first.batches - again.batches)), rounding=False)
    if (first.learning_rates, first.other_rates) != (again.learning_rates, again.other_rates):
        return _rate_difference(first, again)
    epsilon = max(first.epsilon, again.epsilon)
    if first.loss is not None and again.loss is not None and not _equal(first.loss, again.loss):
        amount = _relative(first.loss, again.loss)
        rounding = amount <= slack * LOSS_SHARE * math.sqrt(epsilon)
        return Difference(step, "loss", f"{first.loss:.9g}", f"{again.loss:.9g}", amount, rounding=rounding)
    if first.weights != again.weights and first.weights.counts == again.weights.counts:
        return _weight_difference(first, again, before, slack * slack * epsilon)
    return None


def _position(one: Witness) -> str:
    return f"epoch {one.epoch}, batch {one.batch}, {one.batches} in all"


def _equal(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def _relative(one: float, other: float) -> float:
    """Infinite where one of them is not finite."""
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other))


def _rate_difference(first: Witness, again: Witness) -> Difference:
    pairs = zip(first.learning_rates, again.learning_rates, strict=False)
    amount = max((_relative(one, other) for one, other in pairs if not _equal(one, other)), default=math.inf)
    then, now = (", ".join(f"{rate:.9g}" for rate in one.learning_rates) for one in (first, again))
    return Difference(first.iteration, "learning rate", then, now, amount, rounding=False)


def _weight_difference(first: Witness, again: Witness, before: Witness | None, epsilon: float) -> Difference:
    then, now = first.weights.numbers(), again.weights.numbers()
    differ = numpy.flatnonzero(~((then == now) | (numpy.isnan(then) & numpy.isnan(now))))
    if not differ.size:  # zeros of different sign, or NaNs of different bits
        differ = numpy.arange(len(then))
    apart = numpy.abs(then - now)[differ]
    size = numpy.maximum(numpy.abs(then), numpy.abs(now))[differ]
    if before is not None and before.weights.counts == first.weights.counts:
        moved = numpy.abs(then - before.weights.numbers())[differ]
    else:
        moved = UNKNOWN_UPDATE * size
    allowed = ROUNDED_ULPS * first.weights.epsilons()[differ] * size + UPDATE_SHARE * math.sqrt(epsilon) * moved
    with numpy.errstate(invalid="ignore", divide="ignore"):
        relative = numpy.nan_to_num(apart / numpy.maximum(size, 1e-300), nan=math.inf, posinf=math.inf)
    # A few elements whose gradient is nearly zero move anywhere; an error changes most of those that differ.
    rounding = bool(2 * numpy.count_nonzero(apart <= allowed) >= differ.size)
    amount = float(numpy.median(relative))
    hashes = f"{first.weights_hash:016x}", f"{again.weights_hash:016x}"
    elements, known = tuple(differ.tolist()), None not in (first.loss, again.loss)
    return Difference(first.iteration, "weights", *hashes, amount, rounding, elements, known)


# The ring


def witness_path(run_dir: Path, rank: int) -> Path:
    """Where a rank's witnesses lie."""
    return run_dir / "witnesses" / f"rank-{rank:05d}"


def read_witnesses(run_dir: Path, rank: int) -> list[Witness]:
    """The newest witness of each step that a rank still has, in the order of the steps; none without a file.

    Also while the run trains: a record that is being written is left out.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        content = witness_path(run_dir, rank).read_bytes()
    except FileNotFoundError:
        return []
    starts = range(0, len(content) - RECORD_BYTES + 1, RECORD_BYTES)
    found = [_unpacked(content[at : at + RECORD_BYTES]) for at in starts]
    return sorted(witness for witness in found if witness is not None)


class Witnesses:
    """The witnesses of one rank: a ring of records in a mapped file, which survives the process.

    A record has a checksum: one that a kill left half written is as if it were absent. Nothing is forced to the disk.

    Args:
        path: see `witness_path`; created with its directory where it is absent.

    Raises:
        OSError: the file cannot be created or mapped, or the disk is full.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        size = STEPS * RECORD_BYTES
        kept = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        # A new file: a stopped process of an earlier life, which may continue, has the old one mapped.
        new = path.with_name(f"{path.name}.{os.getpid()}.new")
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            os.posix_fallocate(descriptor, 0, size)  # a store into a page without a block would kill the process
            if len(kept) == size:
                os.pwrite(descriptor, kept, 0)
            self._map = mmap.mmap(descriptor, size)
            new.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                new.unlink()
            raise
        finally:
            os.close(descriptor)
        self._record = bytearray(RECORD_BYTES)  # the next one; made in place, as the training thread waits for it
        self._content = memoryview(self._record)[_CHECKSUM.size :]

    def after(self, iteration: int) -> Iterator[Witness]:
        """All later ones that can be read, in no order."""
        iterations = numpy.ndarray((STEPS,), "<u8", self._map, _CHECKSUM.size, (RECORD_BYTES,)).copy()
        for slot in numpy.flatnonzero(iterations > iteration).tolist():
            witness = _unpacked(self._map[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES])
            if witness is not None:
                yield witness

    def find(self, iteration: int) -> Witness | None:
        """The last witness of this step, if it is still there."""
        at = iteration % STEPS * RECORD_BYTES
        witness = _unpacked(self._map[at : at + RECORD_BYTES])
        return witness if witness is not None and witness.iteration == iteration else None

    def put(self, witness: Witness) -> None:
        """Write a witness over the one that has its place: that of the same step, or of `STEPS` before."""
        iteration, life, trajectory, epoch, batch, batches, rates, others, loss, weights, epsilon = witness
        flags, loss = (0, 0.0) if loss is None else (_HAS_LOSS, loss)
        (content, counts), rated = weights, len(rates)
        head = iteration, life, flags, trajectory, epoch, batch, batches, epsilon, loss
        _RECORD.pack_into(self._record, 0, 0, *head, *rates, *_NO_RATES[rated:], others, rated, *counts, content)
        _CHECKSUM.pack_into(self._record, 0, xxhash.xxh3_64_intdigest(self._content))
        at = iteration % STEPS * RECORD_BYTES
        self._map[at : at + RECORD_BYTES] = self._record

    def close(self) -> None:
        """Unmap the file; it keeps its content."""
        self._map.close()


def _unpacked(record: bytes) -> Witness | None:
    """None where there is none, or half of one."""
    checksum, iteration, life, flags, trajectory, epoch, batch, batches, epsilon, loss, *rest = _RECORD.unpack(record)
    if xxhash.xxh3_64_intdigest(record[_CHECKSUM.size :]) != checksum:
        return None
    rates, (others, rated, doubles, floats, bfloats, halves, content) = rest[:RATES], rest[RATES:]
    size = 8 * doubles + 4 * floats + 2 * (bfloats + halves)
    sample = SampledBytes(content[:size], (doubles, floats, bfloats, halves))
    seen = loss if flags & _HAS_LOSS else None
    return Witness(
        iteration, life, trajectory, epoch, batch, batches, tuple(rates[:rated]), others, seen, sample, epsilon
    )
