"""What executions of one step came to, and what follows from their differences."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import xxhash

from cpsr.checkpoint.replicated import WORDS_AT_ONCE, factors, sums
from cpsr.state.shard import bytes_of, integers_of

if TYPE_CHECKING:  # loaded when a step is due
    from cpsr.engines.recorded_step import Evidence

__all__ = ["LEVELS", "Differences", "Fingerprints", "Verdict", "differences", "judge"]
__all__ += ["judge_memory", "judge_neighbors"]

# From the cause to its consequences: in the memory of a rank, in its own arithmetic, and in what ranks share then.
EXECUTED = ("outputs", "gradients", "reduced", "state")  # as `Evidence` has them
LEVELS = ("memory", *EXECUTED)
NAMED = 3  # names of one level that a rank reports
COMPARED_RANKS = 2  # of these none can be told to be the wrong one

# By level, the names of what differs between two executions on one rank.
Differences = Mapping[str, Sequence[str]]


class Fingerprints:
    """Fingerprints of tensors on one device: xxh3-128 on the host, sums by odd factors on a GPU (`replicated.sums`).

    Either finds each flip of a single bit, and misses any other change with a chance of at most 2^-64. On a GPU they
    stay there, so that the host waits for nothing while the step runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._factors = factors().to(device) if device.type == "cuda" else None

    def __call__(self, values: torch.Tensor) -> Any:
        """The fingerprint of a tensor's bits, which `settled` makes comparable."""
        if not values.is_cuda:
            return xxhash.xxh3_128_hexdigest(bytes_of(values).numpy().data)
        assert self._factors is not None
        words = bytes_of(values).view(torch.int32) if values.element_size() > 4 else integers_of(values.reshape(-1))
        return torch.stack([sums(piece, self._factors) for piece in torch.split(words, WORDS_AT_ONCE)])

    @staticmethod
    def settled(found: Mapping[str, Any]) -> dict[str, Any]:
        """The same fingerprints as plain data, once the device has them."""
        return {key: one.tolist() if isinstance(one, torch.Tensor) else one for key, one in found.items()}


def differences(one: "Evidence", other: "Evidence") -> dict[str, list[str]]:
    """By level, the first names that two executions differ in; empty where they are equal."""
    found = {}
    for level in EXECUTED:
        mine, theirs = (Fingerprints.settled(getattr(each, level)) for each in (one, other))
        names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
        if names:
            found[level] = names[:NAMED]
    return found


@dataclass(frozen=True)
class Verdict:
    """What a verification found.

    Attributes:
        kind: `verified`; `wrong`: the arithmetic or the memory of a rank; `unrepeatable`: the loop did something that
            CPSR does not repeat; `nondeterministic`: each execution comes to something else, or ranks always differ.
        ranks: on which the first difference lies; one, if `wrong`.
        where: the level and the names of the first difference, for people.
        execution: the wrong one: `first`, by the loop; `repeated`; or `each`. `memory`: the first had other weights or
            moments than the checkpoint.
    """

    kind: Literal["verified", "wrong", "unrepeatable", "nondeterministic"]
    ranks: tuple[int, ...] = ()
    where: str = ""
    execution: Literal["", "first", "repeated", "each", "memory"] = ""

    def naming(self, operation: str) -> "Verdict":
        """The same, with the operation that differs first."""
        return replace(self, where=f"{operation} ({self.where})")


def judge_memory(changed: Sequence[Sequence[str]], *, repeatable: bool) -> Verdict:
    """Decide about weights and moments that changed between the snapshot and the update.

    Args:
        changed: their names, by rank.
        repeatable: see `judge`.
    """
    located = _located([{"memory": names[:NAMED]} if names else {} for names in changed])
    return Verdict(_of_a_rank(located[0], repeatable), *located, "memory")


def judge(
    first_second: Sequence[Differences],
    third: Callable[[], tuple[Sequence[Differences], Sequence[Differences]]],
    *,
    repeatable: bool,
) -> Verdict:
    """Decide about a step that was executed by the loop and then repeated.

    The loop may do something in a step that CPSR does not repeat. It then does so on all ranks, whose program is one:
    only where the first execution differs on one rank alone, that rank is wrong. A job of one rank has none to compare
    with; there the caller has the loop execute the step once more.

    Args:
        first_second: of each rank, the differences between the two executions.
        third: executes the step once more; the differences of that one from the first, and from the second.
        repeatable: whether a step of this life was repeated with equal results before.
    """
    if not any(first_second):
        return Verdict("verified")
    first_third, second_third = third()
    ranks, where = _located(first_second)
    if not any(second_third):
        return Verdict(_of_a_rank(ranks, repeatable), ranks, where, "first")
    if not any(first_third):  # CPSR alone has executed the one that differs
        return Verdict("wrong" if repeatable and len(ranks) == 1 else "nondeterministic", ranks, where, "repeated")
    ranks, where = _located(second_third)
    if repeatable and len(ranks) == 1 and len(first_second) > 1:  # the same program is deterministic on the others
        return Verdict("wrong", ranks, where, "each")
    return Verdict("nondeterministic", ranks, where)


def _of_a_rank(ranks: Sequence[int], repeatable: bool) -> Literal["wrong", "unrepeatable"]:
    """Whether a difference of the first execution is that of one rank, or of what the loop does on all."""
    return "wrong" if repeatable and len(ranks) == 1 else "unrepeatable"


def _located(found: Sequence[Differences]) -> tuple[tuple[int, ...], str]:
    """The ranks on which the earliest level differs, and what differs there."""
    for level in LEVELS:
        ranks = tuple(rank for rank, one in enumerate(found) if one.get(level))
        if ranks:
            names = found[ranks[0]][level]
            return ranks, f"{level}: {', '.join(names)}"
    return (), ""


def judge_neighbors(
    found: Sequence[Differences], third: Callable[[], Sequence[Differences]], *, agreed: bool
) -> Verdict:
    """Decide about steps that ranks have executed with the inputs of the next rank.

    Args:
        found: by rank, how its execution differs from that of the rank whose step it is; of two ranks at least.
        third: executes the step of the next rank but one, by rank likewise; not called with two ranks.
        agreed: whether all came to equal results in this life before. Else the program may do something else on a rank.
    """
    size = len(found)
    differing = [rank for rank in range(size) if found[rank]]
    if not differing:
        return Verdict("verified")
    _, where = _located([found[rank] for rank in differing])
    if size == COMPARED_RANKS:
        return Verdict("nondeterministic", (0, 1), where, "each")
    opinions = third()  # of the rank before, on the same step
    ranks = {(rank + 1) % size if opinions[rank - 1] else rank for rank in differing}
    return Verdict("wrong" if agreed and len(ranks) == 1 else "nondeterministic", tuple(sorted(ranks)), where, "each")
