"""The journal's rows: one frozen dataclass for each kind, and their JSON.

`docs/journal_rows.md` describes them. Times of day are seconds since 1970 (UTC).
"""

import dataclasses
import enum
import functools
import json
import math
import operator
import time
import typing
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, TypeAdapter

__all__ = [
    "Beginning",
    "CheckpointRow",
    "EventColumns",
    "EventRow",
    "FailureRow",
    "FailureScope",
    "FitRow",
    "LifeRow",
    "Origin",
    "PhaseRow",
    "PlanRow",
    "RecoveryRow",
    "RecoverySource",
    "Row",
    "StepRow",
    "columns_of",
    "decode",
    "encode",
    "json_ready",
    "prepare",
    "row_type_of",
    "step_columns_of",
]

RowT = TypeVar("RowT")
SQLITE_INTEGER_MAX = 2**63 - 1
# What a failure leaves: the memory of every machine; replicas of what a machine held; the disk alone.
FailureScope = Literal["process", "machine", "everything"]
# `predicted`: the state, or one that it was trained from, was predicted, or restored with older experts.
Origin = Literal["trained", "predicted"]

_PLAIN = (str, int, float, type(None), Mapping, list, tuple)
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def json_ready(value: Any) -> Any:
    """A copy as JSON has it: numbers that are not finite by their names, and NumPy's scalars as Python's."""
    if not isinstance(value, _PLAIN) and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    return value


def _from_json(value: Any) -> Any:
    """The inverse of `json_ready`, but for tuples."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _from_json(item) for key, item in value.items()}
    return [_from_json(item) for item in value] if isinstance(value, list) else value


Facts = Annotated[Mapping[str, Any], AfterValidator(_from_json)]


class Beginning(enum.Enum):
    """How a life, or a roll-back inside one, began; the values are the journal's texts for `method`.

    A predicted state is recorded under the name of what predicted it: `line` or `vitp`, or `stale` where
    nothing was moved.
    """

    SCRATCH = "scratch"
    EXACT = "exact"
    #: Every tensor as the ranks left it when their group broke; the small state is stepped ahead from the checkpoint.
    EMERGENCY_DUMP = "departure"
    #: What the checkpoint holds, with some experts that were saved before it.
    OLDER_EXPERTS = "older experts"
    #: The state of at least one rank was predicted.
    PREDICTED = "predicted"

    @classmethod
    def of_method(cls, method: str) -> "Beginning":
        """The beginning behind a journal's text."""
        return next((beginning for beginning in cls if beginning.value == method), cls.PREDICTED)

    @property
    def predicted(self) -> bool:
        """Whether a predictor formed the state, or a part of it; its first iterations are then watched."""
        return self is Beginning.PREDICTED

    @property
    def labelled(self) -> bool:
        """Whether the run never had this state as a whole, so that checkpoints taken from here on say `predicted`."""
        return self in (Beginning.OLDER_EXPERTS, Beginning.PREDICTED)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepRow:
    """One optimizer step; `loss` is None if the library could not see it, NaN if it was NaN."""

    life: int
    iteration: int
    loss: float | None
    learning_rate: float | None
    seconds: float
    applied: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EventRow:
    """Anything that no other row is for; `kind` is a word to filter by."""

    life: int
    rank: int
    kind: str
    message: str
    iteration: int | None = None
    created_unix_seconds: float = dataclasses.field(default_factory=time.time)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LifeRow:
    """One process lifetime of the run, from start to its end or kill.

    It is recorded when the life starts, and again when it ends. `ending` stays `running` if the process was killed; a
    later life then follows.
    """

    KIND: ClassVar[str] = "life"

    life: int
    mode: str
    pid: int
    host: str
    ranks: int | None = None
    ending: Literal["running", "clean", "sigterm", "error"] = "running"
    started_unix_seconds: float = dataclasses.field(default_factory=time.time)
    ended_unix_seconds: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRow:
    """One checkpoint that was due: committed, skipped or failed.

    `bytes` and the seconds are None for steps that did not happen.
    """

    KIND: ClassVar[str] = "checkpoint"

    life: int
    iteration: int
    status: Literal["committed", "skipped", "failed"]
    reason: str = ""
    bytes: int | None = None
    stall_seconds: float | None = None
    write_seconds: float | None = None
    commit_seconds: float | None = None
    origin: Origin = "trained"
    created_unix_seconds: float = dataclasses.field(default_factory=time.time)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FailureRow:
    """A failure at iteration f with the last checkpoint at c (None: there was none); `life` is the one that failed.

    `scope` is what it left, by what the restart found in the machines' memory; None if nobody looked.
    `created_unix_seconds` is when the next life detected it.
    """

    KIND: ClassVar[str] = "failure"

    life: int
    iteration: int
    checkpoint_iteration: int | None
    description: str
    scope: FailureScope | None = None
    created_unix_seconds: float = dataclasses.field(default_factory=time.time)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecoverySource:
    """The source of one rank's state, and the iteration of that state."""

    rank: int
    source: str
    iteration: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryRow:
    """How a life began; recorded again when the outcome is known.

    `method` is the text of a `Beginning`, or the name of the predictor: `line` if the state followed the line through
    the checkpoints, `vitp` if the network turned that line. Training continues at `restored_iteration`;
    `failure_iteration` is None if the run had not failed. `feasible` lists the possible methods,
    `expected_end_cost_iterations` is that of the prediction, `guard` contains the guard's measurements. If `outcome` is
    `vetoed` or `rolled_back`, the state at `checkpoint_iteration` replaced the predicted one. After a roll-back
    `guard["rolled_back_to"]` is the text of its `Beginning`. `origin` is that of the state that training continued
    with.
    """

    KIND: ClassVar[str] = "recovery"

    id: str
    life: int
    failure_iteration: int | None
    checkpoint_iteration: int | None
    restored_iteration: int
    method: str
    requested_mode: str
    feasible: tuple[str, ...] = ()
    expected_end_cost_iterations: float | None = None
    settings: Facts = dataclasses.field(default_factory=dict)
    reason: str = ""
    load_seconds: float | None = None
    predict_seconds: float | None = None
    inject_seconds: float | None = None
    guard: Facts = dataclasses.field(default_factory=dict)
    outcome: Literal["kept", "vetoed", "rolled_back", "watching"] = "kept"
    origin: Origin = "trained"
    sources: tuple[RecoverySource, ...] = ()
    created_unix_seconds: float = dataclasses.field(default_factory=time.time)

    def __post_init__(self) -> None:
        # Older versions wrote `stale` for older experts; what moves nothing is named in the settings, too.
        if self.method == "stale" != self.settings.get("method"):
            object.__setattr__(self, "method", Beginning.OLDER_EXPERTS.value)

    @property
    def beginning(self) -> Beginning:
        """What `method` stands for."""
        return Beginning.of_method(self.method)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    """The checkpoint interval from an iteration on, with its explanation.

    `memory_interval_iterations` is that of snapshots in host memory, None if there are none. `mode` is how a failure
    would be recovered, None if the plan did not choose; `origin` the rule's name.
    """

    KIND: ClassVar[str] = "plan"

    life: int
    from_iteration: int
    interval_iterations: int
    origin: str
    memory_interval_iterations: int | None = None
    mode: Literal["predict", "recompute"] | None = None
    explanation: Facts = dataclasses.field(default_factory=dict)
    created_unix_seconds: float = dataclasses.field(default_factory=time.time)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PhaseRow:
    """One phase of the training that has ended; `xi` is the mean second moment of the gradients at its beginning."""

    KIND: ClassVar[str] = "phase"

    life: int
    phase: int
    first_iteration: int
    last_iteration: int
    xi: float
    last_xi: float
    ended_by: Literal["change", "length"]
    created_unix_seconds: float = dataclasses.field(default_factory=time.time)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FitRow:
    """One curve fitted at an iteration: of the loss, the predictor's error, or failures."""

    KIND: ClassVar[str] = "fit"

    life: int
    iteration: int
    kind: Literal["loss", "predictor", "failure_rate"]
    result: Facts
    created_unix_seconds: float = dataclasses.field(default_factory=time.time)


Row = LifeRow | CheckpointRow | FailureRow | RecoveryRow | PlanRow | PhaseRow | FitRow | EventRow
EventColumns = tuple[str, int, int | None, float, str]
_TYPES = {row_type.KIND: row_type for row_type in typing.get_args(Row) if row_type is not EventRow}
# Rows that name their iteration otherwise.
_ITERATIONS: dict[type[Any], str] = {
    RecoveryRow: "restored_iteration",
    PlanRow: "from_iteration",
    PhaseRow: "last_iteration",
}


def row_type_of(kind: str) -> type[Any]:
    """The type of the rows with this word."""
    row_type: type[Any] = _TYPES.get(kind, EventRow)
    return row_type


def columns_of(row: Row) -> EventColumns:
    """The row's values in the table of events: kind, life, iteration, time, and content.

    Raises:
        ValueError: as `encode`; or an event uses the word of another type.
    """
    content = encode(row)
    kind = row.kind if isinstance(row, EventRow) else row.KIND
    if isinstance(row, EventRow) and kind in _TYPES:
        raise ValueError(f"an event's kind cannot be {kind!r}: that is the word for {_TYPES[kind].__name__}")
    iteration = getattr(row, _ITERATIONS.get(type(row), "iteration"), None)
    _check_counts(row.life, iteration or 0)
    seconds = row.started_unix_seconds if isinstance(row, LifeRow) else row.created_unix_seconds
    return kind, row.life, iteration, seconds, content


def step_columns_of(step: StepRow) -> tuple[Any, ...]:
    """The step's values in the table of steps: life, iteration, loss, learning rate, seconds, and if it was applied.

    Raises:
        TypeError, ValueError: it cannot be stored.
    """

    def real(value: float | None) -> float | str | None:
        # SQLite turns NaN into NULL, which would read back as "unknown".
        return None if value is None else "nan" if math.isnan(value) else float(value)

    life, iteration = operator.index(step.life), operator.index(step.iteration)
    _check_counts(life, iteration)
    return life, iteration, real(step.loss), real(step.learning_rate), real(step.seconds), bool(step.applied)


def _check_counts(*counts: int) -> None:
    if min(counts) < 0 or max(counts) > SQLITE_INTEGER_MAX:
        raise ValueError(f"a life or an iteration is not from 0 to {SQLITE_INTEGER_MAX}: {counts}")


def encode(row: Row) -> str:
    """The row as JSON.

    Raises:
        ValueError: a value is not of its field's type, or JSON cannot express it; the message names the field.
    """
    try:
        content = json.dumps(json_ready(dataclasses.asdict(row)), allow_nan=False)
    except TypeError as error:
        raise ValueError(str(error)) from error
    decode(type(row), content)  # a row that no reader can read must not be written
    return content


def decode(row_type: type[RowT], content: str) -> RowT:
    """The row in a JSON text.

    Raises:
        ValueError: the text is no such row.
    """
    row: RowT = _adapter(typing.cast("Any", row_type)).validate_json(content)
    return row


def prepare() -> None:
    """Build what encodes and decodes rows, which otherwise the first row of each type does, in some milliseconds."""
    for row_type in typing.get_args(Row):
        _adapter(row_type)


@functools.cache
def _adapter(row_type: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(row_type)
