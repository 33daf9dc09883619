"""Replicated operators: several ranks hold the same operator. One of each machine copies it, and one writes it for all.

With ZeRO-0 and DDP all ranks of a data-parallel group hold the same weights and moments. One rank writes each
operator. The other ranks' manifests describe it, too, and name that rank: a manifest lists all operators of its rank,
and loading reads the files of several ranks.

Every rank puts the hash of each replicated operator into its manifest. Rank 0 commits nothing if two hashes differ.
A device makes checksums of what another rank copies, where it lies. Between checkpoints each rank hashes a few elements
of each, by which a restart joins only what belongs together.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy
import torch
import xxhash

from cpsr.checkpoint.manifest import RankManifest, writer_of
from cpsr.checkpoint.parts import REST, Parts
from cpsr.errors import SaveError
from cpsr.state.device_values import to_host
from cpsr.state.shard import OperatorState, Shard, bytes_of, integers_of

__all__ = ["DriftedError", "Replicas", "can_share", "factors", "missing_among"]
__all__ += ["refuse_drifted", "state_hash", "sums"]

# Of each tensor. Ranks begin to share when a commit has found all of it equal.
SAMPLED_ELEMENTS = 12
WORD_BYTES = 4
WORDS_AT_ONCE = 1 << 20
# Of so many words. Their products take 256 MiB of the device. A device queues some thousand operations before the host
# has to wait for it: with these, a thousand are some 30 GiB of state.
ROWS_AT_ONCE = 16


class DriftedError(SaveError):
    """Replicas of an operator differ between two ranks, so that no rank can write for another."""


def can_share(shard: Shard) -> bool:
    """Whether `Replicas` compares all operators: they lie on one device, and none there has elements above 4 bytes."""
    tensors = [values for _, values in Shard(shard.operators).tensors()]
    alike = len({values.device for values in tensors}) <= 1
    return alike and all(not values.is_cuda or values.element_size() <= WORD_BYTES for values in tensors)


def state_hash(operator: OperatorState) -> str:
    """xxh3-128 of an operator's weights and moments on the host, in hexadecimal."""
    state = xxhash.xxh3_128()
    for values in _tensors(operator):
        state.update(bytes_of(values).numpy().data)
    return str(state.hexdigest())


class Replicas:
    """Compares what ranks share, without copies of it.

    Each method reads shards in the order of the current stream, and waits for no device. The function that it returns
    gives the values, once the device has come there.
    """

    def __init__(self) -> None:
        self._operators: dict[str, OperatorState] = {}
        self._tensors: dict[str, list[torch.Tensor]] = {}  # of each part, as integers
        self._chunks: dict[str, list[list[torch.Tensor]]] = {}
        self._sampled: list[list[Any]] = []  # views, by size: a GPU joins others tensor by tensor
        self._counts: list[tuple[str, int]] = []  # part and number of elements, by size likewise
        self._factors: tuple[torch.Tensor, ...] = ()

    def samples(self, shard: Shard, parts: Parts) -> Callable[[], dict[str, str]]:
        """Part -> xxh3-64 of evenly spread elements of its weights and moments, in hexadecimal.

        Ranks that train apart differ in most elements; a single one that differs is found at the next checkpoint.
        """
        self._look(shard, parts)
        if not self._sampled:
            return dict
        on_host = isinstance(self._sampled[0][0], numpy.ndarray)
        join: Callable[[list[Any]], Any] = numpy.concatenate if on_host else torch.cat
        packed = join([join(alike) for alike in self._sampled])
        return partial(_hashed, packed if on_host else to_host(packed), self._counts, xxhash.xxh3_64)

    def checksums(self, shard: Shard, parts: Parts, names: Collection[str]) -> Callable[[], dict[str, str]]:
        """Each of these operators -> xxh3-128 of the `sums` of its whole part, in hexadecimal.

        All ranks that have a part have the same operators in it.
        """
        self._look(shard, parts)
        wanted = sorted(parts.of_all(names))
        for part in wanted:
            if part not in self._chunks:
                self._chunks[part] = list(_in_chunks(self._tensors[part]))
        chunks = [chunk for part in wanted for chunk in self._chunks[part]]
        if not chunks:
            return dict
        made = [sums(_joined(chunk), self._factors_on(chunk[0])).view(-1, 2) for chunk in chunks]
        found = to_host(torch.cat(made))
        counts = [(part, sum(map(_rows, self._chunks[part]))) for part in wanted]

        def by_operator() -> dict[str, str]:
            of_part = _hashed(found, counts, xxhash.xxh3_128)
            return {name: of_part[parts.of(name)] for name in names}

        return by_operator

    def _factors_on(self, like: torch.Tensor) -> torch.Tensor:
        if not self._factors:
            made = factors()
            # Both are kept: the device copies when it comes there.
            host = torch.empty(made.shape, dtype=made.dtype, device="cpu", pin_memory=like.is_cuda).copy_(made)
            there = torch.empty(made.shape, dtype=made.dtype, device=like.device)
            self._factors = host, there.copy_(host, non_blocking=True)
        return self._factors[1]

    def _look(self, shard: Shard, parts: Parts) -> None:
        """Make views, where tensors were replaced."""
        if shard.operators is self._operators:
            return
        self._operators, self._tensors, self._chunks = shard.operators, {}, {}
        for name, one in shard.operators.items():
            if (part := parts.of(name)) != REST:
                self._tensors.setdefault(part, []).extend(map(integers_of, _tensors(one)))
        by_size: dict[int, tuple[list[Any], Counter[str]]] = {}
        for part, values in ((part, values) for part, tensors in self._tensors.items() for values in tensors):
            views, counts = by_size.setdefault(values.element_size(), ([], Counter()))
            some = values[:: max(1, len(values) // SAMPLED_ELEMENTS)]
            views.append(some if some.is_cuda else some.numpy())
            counts[part] += len(some)
        self._sampled = [by_size[size][0] for size in sorted(by_size)]
        self._counts = [found for size in sorted(by_size) for found in by_size[size][1].items()]


def _tensors(operator: OperatorState) -> list[torch.Tensor]:
    return [operator.parameter.values, *(operator.moments[key] for key in sorted(operator.moments))]


def _hashed(rows: Any, counts: Iterable[tuple[str, int]], kind: Callable[[], Any]) -> dict[str, str]:
    """Part -> hash of its rows, which follow those before them."""
    content, at, states = numpy.asarray(rows), 0, dict[str, Any]()
    for part, count in counts:
        states.setdefault(part, kind()).update(content[at : at + count].data)
        at += count
    return {part: state.hexdigest() for part, state in states.items()}


def _in_chunks(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The elements of flat tensors: several rows of `WORDS_AT_ONCE` of one tensor, or what joins to a row at most."""
    chunk, words = list[torch.Tensor](), 0
    for one in tensors:
        count = len(one) // WORDS_AT_ONCE
        rows, rest = one[: count * WORDS_AT_ONCE], one[count * WORDS_AT_ONCE :]
        if count:
            yield from ([piece] for piece in torch.split(rows.view(count, WORDS_AT_ONCE), ROWS_AT_ONCE))
        if words + len(rest) > WORDS_AT_ONCE:
            yield chunk
            chunk, words = [], 0
        chunk.append(rest)
        words += len(rest)
    yield chunk


def _joined(chunk: Sequence[torch.Tensor]) -> torch.Tensor:
    return chunk[0] if len(chunk) == 1 else torch.cat(list(chunk))


def _rows(chunk: Sequence[torch.Tensor]) -> int:
    return len(chunk[0]) if chunk[0].dim() == 2 else 1


def sums(words: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Two checksums of each row of at most `WORDS_AT_ONCE` integers of at most 32 bits: by `factors`, modulo 2^64.

    They are the same on each device, whatever the order of its additions. A change of one word alone always changes
    both: it is less than 2^32 in size, and an odd number times that is no multiple of 2^64. Any other change leaves
    both as they were for 2^-64 of all factors, or fewer. Let 2^v divide all differences, with v < 32, and one of them
    no further: its product has 2^(63-v) values, by the factor, and one of them cancels all other products.
    """
    products: torch.Tensor = words.unsqueeze(-2) * factors[:, : words.shape[-1]]
    return products.sum(-1)


@cache
def factors() -> torch.Tensor:
    """Two rows of odd 64-bit numbers without a pattern, the same ones everywhere (splitmix64)."""
    state = numpy.arange(1, 2 * WORDS_AT_ONCE + 1, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> numpy.uint64(shift))) * numpy.uint64(factor)
    state ^= state >> numpy.uint64(31)
    return torch.from_numpy((state | numpy.uint64(1)).view(numpy.int64)).view(2, -1)


def missing_among(records: Mapping[int, RankManifest]) -> Iterator[tuple[int, str]]:
    """State that ranks left to others which did not write it: the rank, and what is wrong, as a clause.

    Args:
        records: of all ranks; state of an absent rank is not judged.
    """
    for rank, record in records.items():
        for file, names in record.frozen_files().items():
            writer = writer_of(file)
            listed = file in record.files or (writer in records and file in records[writer].files)
            if not listed and (writer in records or writer >= record.world_size):
                yield rank, f"leaves {min(names)!r} to rank {writer}, which did not save {file}"
        for name, one in record.operators.items():
            if one.saved_by is None or (one.saved_by not in records and one.saved_by < record.world_size):
                continue
            written = records[one.saved_by].operators.get(name) if one.saved_by in records else None
            if written is None or written.saved_by is not None or not written.is_same_state(one):
                yield (
                    rank,
                    f"leaves {name!r} of iteration {one.iteration} to rank {one.saved_by}, which did not save it",
                )


def refuse_drifted(records: Mapping[int, RankManifest]) -> None:
    """Compare the hashes of each operator on its writer and on the ranks that left it to the writer.

    Raises:
        DriftedError: two differ.
    """
    for rank, record in records.items():
        for name, one in record.operators.items():
            if one.saved_by is not None and one.xxh3_128 != records[one.saved_by].operators[name].xxh3_128:
                raise DriftedError(
                    f"ranks {one.saved_by} and {rank} should hold the same weights and moments, as ranks that train on "
                    f"different data in one data-parallel group do, and differ in or near {name!r} at iteration "
                    f"{one.iteration}"
                )
