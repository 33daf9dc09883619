"""Replicated operators: several ranks hold the same operator, and one of them writes it for all.

With ZeRO-0 and DDP all ranks of a data-parallel group hold the same weights and moments. One rank writes each
operator. The other ranks' manifests describe it, too, and name that rank: a manifest lists all operators of its rank,
and loading reads the files of several ranks.

Every rank puts the hash of each replicated operator into its manifest. Rank 0 commits nothing if two hashes differ.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import xxhash

from cpsr.checkpoint.host_snapshot import Contents
from cpsr.checkpoint.manifest import OperatorRecord, RankManifest, expert_files, file_name, frozen_writer
from cpsr.errors import SaveError
from cpsr.state.shard import OperatorState, Shard

__all__ = ["Drifted", "DriftedError", "drifted", "files_with", "is_written", "missing_among"]
__all__ += ["records_of_others", "state_hash"]


@dataclass(frozen=True)
class Drifted:
    """Replicas of one operator that differ between two ranks.

    Attributes:
        operator: the first that differs.
        ranks: the two ranks.
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
    """Replicas differ, so that no rank can write for another."""

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
    contents: Contents, in_memory: Shard, iteration: int, before: Mapping[str, OperatorRecord]
) -> dict[str, OperatorRecord]:
    """Records of the operators that other ranks write, for this rank's manifest.

    Args:
        contents: of this rank's part.
        in_memory: this rank's state in host memory, without carried operators.
        iteration: of the checkpoint.
        before: this rank's records in the last checkpoint that it wrote in this attempt.

    Raises:
        SaveError: an expert to be carried was not saved in this attempt.
    """
    found: dict[str, OperatorRecord] = {}
    for name, writer in contents.writers.items():
        if name not in contents.carried:
            taken = {"iteration": iteration, "saved_by": writer, "xxh3_128": state_hash(in_memory.operators[name])}
            found[name] = contents.replicated[name].model_copy(update=taken)
        elif name in before and before[name].saved_by == writer:
            found[name] = before[name]
        else:
            raise SaveError(
                f"{name!r} is not saved now, and rank {writer} was not to save it since the run went on either; the "
                "next checkpoint must save all experts"
            )
    return found


def is_written(writer: RankManifest, name: str, operator: OperatorRecord) -> bool:
    """Whether a rank wrote an operator of another rank, in this or an earlier checkpoint."""
    found = writer.operators.get(name)
    return found is not None and found.saved_by is None and found.is_same_state(operator)


def missing_among(records: Mapping[int, RankManifest]) -> Iterator[tuple[int, str]]:
    """State that ranks left to others which did not write it: the rank, and what is wrong, as a clause.

    Args:
        records: of all ranks; state of an absent rank is not judged.
    """
    for rank, record in records.items():
        for file, names in record.frozen_files().items():
            writer = frozen_writer(file)
            if (writer in records or writer >= record.world_size) and (
                writer not in records or file not in records[writer].files
            ):
                yield rank, f"leaves {min(names)!r} to rank {writer}, which did not save {file}"
        for name, one in record.operators.items():
            if one.saved_by is None or (one.saved_by not in records and one.saved_by < record.world_size):
                continue
            if one.saved_by not in records or not is_written(records[one.saved_by], name, one):
                yield (
                    rank,
                    f"leaves {name!r} of iteration {one.iteration} to rank {one.saved_by}, which did not save it",
                )


def drifted(records: Mapping[int, RankManifest]) -> Drifted | None:
    """The first operator with different hashes on its writer and on a rank that left it to the writer; None: none."""
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
