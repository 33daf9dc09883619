"""The journal's rows: one frozen dataclass per table, and its conversion to and from SQLite.

Every field is a column of the same name; `docs/journal*.md` describe them. Times of day are seconds since 1970 (UTC).
"""

import dataclasses
import json
import math
import operator
import time
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from cpsr.journal.beginning import Beginning

__all__ = [
    "BacktestRow",
    "BubbleRow",
    "CheckpointRow",
    "EventRow",
    "FailureRow",
    "FailureScope",
    "FitRow",
    "LearningRow",
    "LifeRow",
    "PhaseRow",
    "PlanRow",
    "RecoveryRow",
    "RecoverySource",
    "SQLValue",
    "StepRow",
    "TotalsRow",
    "columns",
    "encode_json",
    "from_sql",
    "json_ready",
    "to_sql",
]

Row = TypeVar("Row")
SQLValue = int | float | str | None
# What a failure leaves: the memory of every machine; replicas of what a machine held; the disk alone.
FailureScope = Literal["process", "machine", "everything"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LifeRow:
    """One process lifetime of the run, from start to its end or kill.

    `ending` stays `running` if the process was killed; a later life then follows. `restored_iteration` is None for a
    life that started from scratch. `ranks` is their number, None in lives of earlier versions.
    """

    life: int
    mode: str
    pid: int
    host: str
    started_unix_seconds: float = dataclasses.field(default_factory=time.time)
    ended_unix_seconds: float | None = None
    ending: Literal["running", "clean", "sigterm", "error"] = "running"
    restored_iteration: int | None = None
    ranks: int | None = None


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
class CheckpointRow:
    """One checkpoint that was due: committed, skipped or failed.

    `bytes` and the seconds are None for steps that did not happen. `origin` is `predicted` if the state, or any state
    that it was trained from, was predicted, or restored with older experts or from weights alone.
    """

    life: int
    iteration: int
    status: Literal["committed", "skipped", "failed"]
    reason: str = ""
    bytes: int | None = None
    stall_seconds: float | None = None
    write_seconds: float | None = None
    commit_seconds: float | None = None
    origin: Literal["trained", "predicted"] = "trained"
    created_unix_seconds: float = dataclasses.field(default_factory=time.time)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FailureRow:
    """A failure at iteration f with the last checkpoint at c (None: there was none); `life` is the one that failed.

    `scope` is what it left, by what the restart found in the machines' memory; None if that was not recorded.
    """

    life: int
    iteration: int
    checkpoint_iteration: int | None
    description: str
    detected_unix_seconds: float = dataclasses.field(default_factory=time.time)
    scope: FailureScope | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecoverySource:
    """The source of one rank's state, and the iteration of that state."""

    rank: int
    source: str
    iteration: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryRow:
    """How a life began.

    `method` is the text of a `Beginning`, or the name of the predictor: `line` if the state followed the line through
    the checkpoints, `vitp` if the network turned that line (older journals have `vitp` for both). Training continues at
    `restored_iteration`; `failure_iteration` is None if the run had not failed. `feasible` lists the possible methods,
    `expected_end_cost_iterations` is that of the prediction, `guard` contains the guard's measurements. If
    `outcome` is `vetoed` or `rolled_back`, the state at `checkpoint_iteration` replaced the predicted one. After a
    roll-back `guard["rolled_back_to"]` is the text of its `Beginning`; older journals lack it.
    """

    id: str
    life: int
    failure_iteration: int | None
    checkpoint_iteration: int | None
    restored_iteration: int
    method: str
    requested_mode: str
    feasible: Sequence[str] = ()
    expected_end_cost_iterations: float | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reason: str = ""
    load_seconds: float | None = None
    predict_seconds: float | None = None
    inject_seconds: float | None = None
    guard: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    outcome: Literal["kept", "vetoed", "rolled_back", "watching"] = "kept"
    created_unix_seconds: float = dataclasses.field(default_factory=time.time)
    sources: tuple[RecoverySource, ...] = dataclasses.field(default=(), metadata={"column": False})

    @property
    def beginning(self) -> Beginning:
        """What `method` stands for."""
        return Beginning.of(self.method)

    @property
    def given_up(self) -> bool:
        """Whether a predicted state was vetoed or rolled back, so that training went on from the checkpoint."""
        return self.beginning.watched and self.outcome in ("vetoed", "rolled_back")

    @property
    def labelled(self) -> bool:
        """Whether training went on from a state whose checkpoints say `predicted`."""
        if self.given_up:
            return Beginning.of(self.guard.get("rolled_back_to", Beginning.EXACT.value)).labelled
        return self.beginning.labelled


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    """The checkpoint interval from an iteration on, with its explanation.

    `memory_interval_iterations` is that of snapshots in host memory, None if there are none. `mode` is how a failure
    would be recovered, None if the plan did not choose; `origin` the rule's name.
    """

    life: int
    from_iteration: int
    interval_iterations: int
    origin: str
    memory_interval_iterations: int | None = None
    mode: Literal["predict", "recompute"] | None = None
    explanation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    created_unix_seconds: float = dataclasses.field(default_factory=time.time)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PhaseRow:
    """One phase of the training that has ended; `xi` is the mean second moment of the gradients at its beginning."""

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

    life: int
    iteration: int
    kind: Literal["loss", "predictor", "failure_rate"]
    result: Mapping[str, Any]
    created_unix_seconds: float = dataclasses.field(default_factory=time.time)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BacktestRow:
    """A backtest: the prediction of the checkpoint at `iteration` from earlier ones.

    `checkpoints` is the number that it has learned from, that one included; `result` contains the measurements.
    """

    life: int
    iteration: int
    checkpoints: int
    result: Mapping[str, Any]
    created_unix_seconds: float = dataclasses.field(default_factory=time.time)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LearningRow:
    """How much of the run the predictor has taken in, whenever that changes.

    `checkpoints` of those from `first_iteration` on were taken in, the newest at `iteration` (None: none yet), and its
    network had `updates` on the run itself.
    """

    life: int
    iteration: int | None
    first_iteration: int
    checkpoints: int
    updates: int
    created_unix_seconds: float = dataclasses.field(default_factory=time.time)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BubbleRow:
    """One rank's waits (its bubbles) since its previous row, and the work in them.

    The row covers `seconds` and `iterations`. `used_seconds` is other work inside of waits, `late_seconds` its part
    past their ends, `outside_seconds` work that began outside. `copied_bytes` of snapshots were copied while the rank
    waited, in `copied_seconds`, and `copied_beside_bytes` beside its work; None if copies do not use the waits.
    """

    life: int
    rank: int
    iteration: int
    iterations: int
    seconds: float
    bubble_seconds: float
    used_seconds: float
    late_seconds: float
    outside_seconds: float
    slices: int
    late_slices: int
    copied_seconds: float | None = None
    copied_bytes: int | None = None
    copied_beside_bytes: int | None = None
    created_unix_seconds: float = dataclasses.field(default_factory=time.time)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EventRow:
    """Any other event in the run's history; `kind` is a word to filter by."""

    life: int
    rank: int
    kind: str
    message: str
    iteration: int | None = None
    created_unix_seconds: float = dataclasses.field(default_factory=time.time)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TotalsRow:
    """How the run's time had been spent up to `created_unix_seconds`: sums over all lives, kept by the writer.

    `moment` is what the row is recorded for: the `start` or the `end` of a life that follows one in good order, the
    last step before a `failure`, the begin of the `first` step of a life, or steps that a life has reported (`step`).
    Steps up to `repeated_until_iteration` were trained before. Stalls lie within steps; `repeated_stall_seconds` is the
    part of both kinds in repeated ones. `paused_seconds` lie between a life that ended in good order and the next.
    """

    life: int
    moment: Literal["start", "end", "failure", "first", "step"]
    iteration: int = 0
    reached_iteration: int = 0
    repeated_until_iteration: int = 0
    step_seconds: float = 0.0
    repeated_seconds: float = 0.0
    checkpoint_stall_seconds: float = 0.0
    memory_stall_seconds: float = 0.0
    repeated_stall_seconds: float = 0.0
    memory_snapshots: int = 0
    restart_seconds: float = 0.0
    paused_seconds: float = 0.0
    created_unix_seconds: float = dataclasses.field(default_factory=time.time)


def columns(row_type: type[Any]) -> tuple[str, ...]:
    """Names of the row's columns, in field order."""
    return tuple(name for name, _, _ in _layout(row_type))


def to_sql(row: Any) -> tuple[SQLValue, ...]:
    """The row's column values as SQLite takes them.

    Raises:
        TypeError: a value is not of its field's type; the message names the field. (SQLite itself would store a numpy
            integer as a blob.)
        ValueError: a structured field has a value that JSON cannot express.
    """
    values = []
    for name, kind, optional in _layout(type(row)):
        try:
            values.append(_value_to_sql(getattr(row, name), kind, optional))
        except TypeError as error:
            raise TypeError(f"{type(row).__name__}.{name}: {error}") from error
    return tuple(values)


def _value_to_sql(value: Any, kind: type, optional: bool) -> SQLValue:
    if value is None and optional:
        return None
    if kind is float:
        number = float(value)
        # SQLite turns NaN into NULL, which would read back as "unknown".
        return "nan" if math.isnan(number) else number
    if kind is int:
        return operator.index(value)
    if kind is bool:
        return int(bool(value))
    if kind is str:
        if not isinstance(value, str):
            raise TypeError(f"expected a string, found {type(value).__name__}")
        return value
    return encode_json(value)


def encode_json(value: Any) -> str:
    """A structured value as the JSON text of its column."""
    return json.dumps(dict(value) if isinstance(value, Mapping) else list(value), sort_keys=True)


def from_sql(row_type: type[Row], values: Sequence[SQLValue], **more: Any) -> Row:
    """Build a row from its column values in the order of `columns`.

    Raises:
        TypeError, ValueError: a value is not of its column's type: the file is damaged.
    """
    fields = {
        name: None if value is None else _value_from_sql(value, kind)
        for (name, kind, _), value in zip(_layout(row_type), values, strict=True)
    }
    return row_type(**fields, **more)


def _value_from_sql(value: int | float | str, kind: type) -> Any:
    if kind in (float, bool):
        return kind(value)
    if kind is dict or kind is tuple:
        return kind(json.loads(str(value)))
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value


def json_ready(value: Any) -> Any:
    """A copy with NaN and infinities as strings, since JSON has no numbers for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    return value


_layouts: dict[type[Any], tuple[tuple[str, type, bool], ...]] = {}


def _layout(row_type: type[Any]) -> tuple[tuple[str, type, bool], ...]:
    """Name, kind (int, float, bool, str, or dict and tuple for JSON) and nullability of each column."""
    if row_type not in _layouts:
        _layouts[row_type] = _find_layout(row_type)
    return _layouts[row_type]


def _find_layout(row_type: type[Any]) -> tuple[tuple[str, type, bool], ...]:
    hints = typing.get_type_hints(row_type)
    fields = [field.name for field in dataclasses.fields(row_type) if field.metadata.get("column", True)]
    return tuple((name, *_kind(hints[name])) for name in fields)


def _kind(hint: Any) -> tuple[type, bool]:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
        return _kind(hint)[0], True
    if typing.get_origin(hint) is Literal:
        return str, False
    if hint in (int, float, bool, str):
        return hint, False
    return (dict if issubclass(typing.get_origin(hint), Mapping) else tuple), False
