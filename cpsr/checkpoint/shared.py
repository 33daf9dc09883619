"""Checkpoints for which ranks that hold the same write one part of it each.

With ZeRO-0 and DDP all ranks of a data-parallel group hold the same weights and moments. Each operator is then in one
rank's files; the manifests of the others describe it, too, and name that rank. So a manifest lists everything that its
rank holds, as ever, and loading looks into the files of several ranks.

That they do hold the same is not taken on trust: ranks say the hash of each such operator, also of those that
they leave to others, and rank 0 commits nothing where two differ.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import xxhash

from cpsr.checkpoint.manifest import OperatorRecord, RankManifest, file_name
from cpsr.checkpoint.sparse import expert_files
from cpsr.errors import SaveError
from cpsr.state import OperatorState, Shard

__all__ = ["Drifted", "DriftedError", "Shared", "drifted", "files_with", "is_written", "missing_among"]
__all__ += ["records_of_others", "state_hash"]


@dataclass(frozen=True)
class Shared:
    """Which of a rank's operators other ranks hold, too, and which rank writes each.

    Attributes:
        alike: operators that others hold, too, described.
        writers: those of `alike` that another rank writes -> that rank.
        carried: those of `writers` that nobody writes now: parameters of experts that their rank carries along.

    Raises:
        ValueError: another rank is to write, or to carry, what only this one holds.
    """

    alike: Mapping[str, OperatorRecord]
    writers: Mapping[str, int]
    carried: frozenset[str] = field(default=frozenset())

    def __post_init__(self) -> None:
        if not (self.carried <= self.writers.keys() <= self.alike.keys()):
            raise ValueError("other ranks write only what they hold, too, and carry only what they write")

    def own(self, shard: Shard) -> Shard:
        """The shard without what other ranks write; views of the same memory."""
        return Shard({name: one for name, one in shard.operators.items() if name not in self.writers}, shard.others)


@dataclass(frozen=True)
class Drifted:
    """Two ranks that should hold the same, and do not.

    Attributes:
        operator: the first that differs.
        ranks: that hold it.
        iteration: of the checkpoint.
    """

    operator: str
    ranks: tuple[int, int]
    iteration: int

    def __str__(self) -> str:
        first, second = self.ranks
        return (
            f"ranks {first} and {second} should hold the same of {self.operator!r}, as ranks that train on different "
            f"data in one data-parallel group do, and differ at iteration {self.iteration}"
        )


class DriftedError(SaveError):
    """Ranks that should hold the same differ, so that none can write for the other."""

    def __init__(self, drifted: Drifted) -> None:
        super().__init__(str(drifted))
        self.drifted = drifted


def state_hash(operator: OperatorState) -> str:
    """xxh3-128 of an operator's weights and moments on the host, in hexadecimal."""
    state = xxhash.xxh3_128()
    for values in (operator.parameter.values, *(operator.moments[key] for key in sorted(operator.moments))):
        state.update(values.detach().reshape(-1).view(torch.uint8).numpy().data)
    return str(state.hexdigest())


def records_of_others(
    shared: Shared, held: Shard, iteration: int, before: Mapping[str, OperatorRecord]
) -> dict[str, OperatorRecord]:
    """The description of what other ranks write, for this rank's manifest.

    Args:
        shared: who writes what.
        held: what this rank has in host memory: all of it, but for what is carried.
        iteration: of the checkpoint.
        before: this rank's descriptions in the last checkpoint that it wrote since the run went on.

    Raises:
        SaveError: an expert is to be carried along that was not saved since the run went on.
    """
    found: dict[str, OperatorRecord] = {}
    for name, writer in shared.writers.items():
        if name not in shared.carried:
            taken = {"iteration": iteration, "saved_by": writer, "xxh3_128": state_hash(held.operators[name])}
            found[name] = shared.alike[name].model_copy(update=taken)
        elif name in before and before[name].saved_by == writer:
            found[name] = before[name]
        else:
            raise SaveError(
                f"{name!r} is not saved now, and rank {writer} was not to save it since the run went on either; the "
                "next checkpoint must save all experts"
            )
    return found


def is_written(writer: RankManifest, name: str, operator: OperatorRecord) -> bool:
    """Whether a rank has written, in this or an earlier checkpoint, what another leaves to it."""
    found = writer.operators.get(name)
    return found is not None and found.saved_by is None and found.is_same_state(operator)


def missing_among(records: Mapping[int, RankManifest]) -> Iterator[tuple[int, str]]:
    """What ranks leave to others that have not written it: the rank, and what is wrong, in a clause.

    Args:
        records: of all ranks; what is left to one that is not there is not judged.
    """
    for rank, record in records.items():
        for name, one in record.operators.items():
            if one.saved_by is None or (one.saved_by not in records and one.saved_by < record.world_size):
                continue
            if one.saved_by not in records or not is_written(records[one.saved_by], name, one):
                yield (
                    rank,
                    f"leaves {name!r} of iteration {one.iteration} to rank {one.saved_by}, which did not save it",
                )


def drifted(records: Mapping[int, RankManifest]) -> Drifted | None:
    """The first operator whose hash two ranks say differently, one of which leaves it to the other; None: no one."""
    for rank, record in records.items():
        for name, one in record.operators.items():
            if one.saved_by is not None and one.xxh3_128 != records[one.saved_by].operators[name].xxh3_128:
                return Drifted(name, (one.saved_by, rank), one.iteration)
    return None


def files_with(writer: int, operators: Iterable[OperatorRecord]) -> list[str]:
    """Files in which a rank has the weights and moments of operators that others left to it, if it has these files."""
    ages = sorted({one.iteration for one in operators})
    names = [file_name(writer, "params"), file_name(writer, "moments")]
    return names + [name for age in ages for name in expert_files(writer, age)]
