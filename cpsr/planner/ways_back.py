"""The ways back from a failure: what each is expected to cost, and which goes first; for plans and for restarts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy

from cpsr.planner.inputs import PlannerInputs
from cpsr.planner.recovery_curve import EndCostCurve, Row, as_row

__all__ = ["Prices", "Way", "WayName", "exact_price", "in_order", "predicted_price"]

WayName = Literal["memory", "replica", "window", "predicted", "disk"]


@dataclass(frozen=True)
class Way:
    """One way back.

    Attributes:
        name: `memory`, `replica`, `window`, `predicted` or `disk`.
        loss_seconds: training that is repeated; or an end cost in seconds of training, and the time to predict.
        deviation_seconds: standard deviation of an expected end cost; 0 of what is repeated.
        load_seconds: until the state is read, before it goes into the engine; 0 where it was not measured.
    """

    name: WayName
    loss_seconds: float
    deviation_seconds: float = 0.0
    load_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.loss_seconds + self.load_seconds

    @property
    def safe_seconds(self) -> float:
        """With a standard deviation more: what an exact way must cost, so that this one goes before it."""
        return self.seconds + self.deviation_seconds


def in_order(ways: Sequence[Way], *, predicts: bool) -> list[Way]:
    """The ways, the one that goes first in front.

    A prediction goes before a window only if it is cheaper by more than a standard deviation. It never goes before a
    snapshot or a replica, whose interval is planned. Before the disk it goes if the plan predicts, which counts costs
    beyond this failure. A window goes before the disk if it is cheaper.

    Args:
        ways: of one failure, in the order of the ladder, which decides between equal costs.
        predicts: whether the plan predicts.
    """
    exact, predicted = list[Way](), list[Way]()
    for way in ways:
        (predicted if way.name == "predicted" else exact).append(way)
    if exact and exact[0].name == "window":
        exact.sort(key=lambda way: way.seconds)
    if predicts and predicted and exact and _goes_before(predicted[0], exact[0]):
        return [*predicted, *exact]
    return [*exact[:1], *sorted([*exact[1:], *predicted], key=lambda way: way.seconds)]


def _goes_before(predicted: Way, exact: Way) -> bool:
    return exact.name == "disk" or (exact.name == "window" and predicted.safe_seconds < exact.seconds)


@dataclass(frozen=True)
class Prices:
    """What a plan leaves in checkpoints, by which a restart compares the states that it finds.

    Attributes:
        iteration_seconds: of one iteration.
        predict_seconds: of a prediction.
        load_seconds: until a state is read, before it goes into the engine, by its place: `disk` or `memory`; what was
            not measured is left out.
        line: end cost of a prediction, `a + b u + c T_c`, where `lost_share` of the state is lost; None: not possible.
        covariance: of its coefficients.
        interval_iterations: T_c, between checkpoints.
        lost_share: of the state, for which the line holds.
    """

    iteration_seconds: float
    predict_seconds: float = 0.0
    load_seconds: Mapping[str, float] = field(default_factory=dict)
    line: Row | None = None
    covariance: tuple[Row, Row, Row] | None = None
    interval_iterations: int = 1
    lost_share: float = 1.0

    @classmethod
    def of_job(cls, job: PlannerInputs, interval_iterations: int) -> "Prices | None":
        """What a plan knows; None where a time is not known."""
        known_seconds = (job.predict_seconds, job.lost_share, *job.load_seconds.values())
        if not (0 < job.iteration_seconds < math.inf and all(map(math.isfinite, known_seconds))):
            return None
        known: dict[str, Any] = {}
        if isinstance(job.recovery, EndCostCurve):
            rows = [as_row(row) for row in job.recovery.covariance.tolist()]
            known = {"line": job.recovery.coefficients, "covariance": (rows[0], rows[1], rows[2])}
        return cls(
            job.iteration_seconds,
            job.predict_seconds,
            dict(job.load_seconds),
            interval_iterations=interval_iterations,
            lost_share=job.lost_share,
            **known,
        )

    @classmethod
    def of_tree(cls, tree: Mapping[str, Any] | None) -> "Prices | None":
        """What `to_tree` returned; None of None."""
        if tree is None:
            return None
        line, covariance = tree["line"], tree["covariance"]
        rows = None if covariance is None else tuple(as_row(row) for row in covariance)
        return cls(**{**tree, "line": None if line is None else as_row(line), "covariance": rows})

    def to_tree(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    def repeated(self, name: WayName, iterations: int) -> Way:
        """An exact state that is so many iterations older than the failure."""
        load = self.load_seconds.get("disk" if name == "disk" else "memory", 0.0)
        return Way(name, iterations * self.iteration_seconds, 0.0, load)

    def predicted(self, horizon_iterations: int, share: float) -> Way | None:
        """A prediction over so many iterations of a share of the state; None where none was possible."""
        if self.line is None or self.covariance is None:
            return None
        curve = EndCostCurve.of_estimate(self.line, self.covariance, 1.0)
        interval, part = float(self.interval_iterations), share / self.lost_share
        cost = float(curve.end_cost_iterations(numpy.array([float(horizon_iterations)]), interval)[0])
        deviation = curve.deviation_iterations(float(horizon_iterations), interval)
        seconds = part * self.iteration_seconds
        loss = cost * seconds + self.predict_seconds
        return Way("predicted", loss, deviation * seconds, self.load_seconds.get("disk", 0.0))


def exact_price(iterations: float) -> str:
    """The price, in words, of going back to a checkpoint that many iterations before the failure."""
    count = f"{iterations:.0f}"
    return f"exact: {count} iteration{'' if count == '1' else 's'} later"


def predicted_price(end_cost_iterations: float, deviation_iterations: float) -> str:
    """The price, in words, of a prediction; below 0 the run ends with a lower loss.

    Args:
        end_cost_iterations: expected.
        deviation_iterations: standard deviation of that.
    """
    spread = f" ± {deviation_iterations:.0f}" if deviation_iterations >= 0.5 else ""
    return f"predicted state; expected cost {end_cost_iterations:z.0f}{spread} iterations"
