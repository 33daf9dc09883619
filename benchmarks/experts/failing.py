"""One run with four failures, by what becomes of the experts that are older than the checkpoint."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from cpsr.benchmarks.experts.followed import Followed, rank_budget
from cpsr.benchmarks.experts.names import CATCH_UP, CATCH_UP_NOTHING, MADE_UP, STALE
from cpsr.benchmarks.experts.saved import Saved
from cpsr.benchmarks.experts.tasks import Failures
from cpsr.benchmarks.experts.training import Training
from cpsr.config import ExpertsConfig
from cpsr.errors import CPSRError

__all__ = ["Curve", "follow"]


STEP_FACTOR = ExpertsConfig().catch_up_step_factor


@dataclass(frozen=True)
class _Mode:
    """What becomes of stale experts.

    Attributes:
        more_capacity: by which that of their layers is raised meanwhile.
        step_factor: of their steps meanwhile.
        whole: none is stale after all, and the rest is as if they were.
    """

    more_capacity: float = 0.0
    step_factor: float = 1.0
    whole: bool = False


_MODES = {
    STALE: _Mode(),
    MADE_UP: _Mode(more_capacity=0.1),  # moetion, section 6
    CATCH_UP: _Mode(step_factor=STEP_FACTOR),
    CATCH_UP_NOTHING: _Mode(step_factor=STEP_FACTOR, whole=True),
}
VALIDATION_ITERATIONS = 10
CURVE_BEFORE_ITERATIONS = 200  # as far back as a lag is looked for


@dataclass
class Curve:
    """Validation losses.

    Attributes:
        iterations: at which they were taken.
        losses: of each chunk, there.
    """

    iterations: list[int] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)

    def add(self, training: Training) -> None:
        """Validate now."""
        self.iterations.append(training.iteration)
        self.losses.append(training.validate().tolist())


@dataclass
class _FaultFree:
    """The run without failures: its curve, its routed tokens, and what the first failure is compared with."""

    tokens: NDArray[numpy.int64]
    curve: Curve = field(default_factory=Curve)
    checkpoint: Saved | None = None
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def follow(training: Training, failures: Failures) -> dict[str, Any]:
    """Train without failures, then from the first failure on with all of them, by every policy and mode.

    Args:
        training: at iteration 0.
        failures: when.

    Returns:
        Plain data: `fault_free`, a curve; `tokens`, `(layers, experts)` over its iterations; `runs`, one for each
        policy and mode, see `_with_failures`.

    Raises:
        CPSRError: the machine does not compute the same twice: nothing would be paired.
    """
    budget = rank_budget(training, failures.experts_per_layer)
    policies = [Followed(name, training, budget) for name in failures.policies]
    fault_free = _without_failures(training, failures, policies)
    _require_exact(training, fault_free, failures.at[0])
    assert fault_free.checkpoint is not None
    runs = [
        _with_failures(training, failures, policy, mode, fault_free.checkpoint)
        for policy in policies
        for mode in failures.modes
    ]
    return {"fault_free": asdict(fault_free.curve), "tokens": fault_free.tokens.tolist(), "runs": runs}


def _without_failures(training: Training, failures: Failures, policies: Sequence[Followed]) -> _FaultFree:
    """To the end; policies are followed up to the first failure."""
    experts = numpy.zeros((len(training.layers), training.layers[0].experts), dtype=numpy.int64)
    found, first = _FaultFree(experts), failures.checkpoint_before(failures.at[0])
    while training.iteration < failures.fault_free_end:
        training.step()
        at = training.iteration
        if at % failures.interval_iterations == 0:
            routed = training.routed()
            found.tokens += sum(numpy.stack(one.routed.tokens) for one in routed)
            if at <= first:
                for policy in policies:
                    policy.save(routed)
        if at == first:
            found.checkpoint = Saved(training.adapter.shard(), training.iteration, training.adapter.scalars())
        if at == failures.at[0]:
            found.weights = _weights(training)
        if at % VALIDATION_ITERATIONS == 0 and at >= first - CURVE_BEFORE_ITERATIONS:
            found.curve.add(training)
    return found


def _with_failures(
    training: Training, failures: Failures, policy: Followed, mode: str, checkpoint: Saved
) -> dict[str, Any]:
    """From the first failure to the end.

    Args:
        training: anywhere.
        failures: when.
        policy: what it had saved at the first failure.
        mode: one of the failures'.
        checkpoint: everything as it was at the first failure's checkpoint.

    Returns:
        `policy` and `mode`; `account` of lost tokens at the end; `failures`. Each failure has its `curve` from its
        checkpoint to the next failure, and `ages` of this rank's experts in iterations. It also has `saved_experts`
        of all ranks in each checkpoint since the failure before.
    """
    how, found = _MODES[mode], list[dict[str, Any]]()
    policy = policy.fork(how.more_capacity, how.step_factor, checkpoint if how.whole else None)
    for failure, until in zip(failures.at, (*failures.at[1:], failures.end), strict=True):
        ages, saved_experts = policy.ages(), policy.saved_experts
        policy.put_back()
        assert training.iteration == failures.checkpoint_before(failure)
        curve = Curve()
        curve.add(training)
        while training.iteration < until:
            training.step()
            if training.iteration % failures.interval_iterations == 0:
                policy.save(training.routed())
            if training.iteration % VALIDATION_ITERATIONS == 0:
                curve.add(training)
        found.append({"curve": asdict(curve), "ages": ages, "saved_experts": saved_experts})
    policy.close()
    return {"policy": policy.name, "mode": mode, "account": policy.account(), "failures": found}


def _require_exact(training: Training, fault_free: _FaultFree, failure: int) -> None:
    """Everything at the checkpoint, trained on to the failure, is what it was there: a dense recovery costs no loss."""
    assert fault_free.checkpoint is not None
    fault_free.checkpoint.put_back(training.adapter.shard())
    training.adapter.load_scalars(fault_free.checkpoint.scalars)
    training.adapter.push_down()
    training.forget_routed()
    while training.iteration < failure:
        training.step()
    for name, values in _weights(training).items():
        if not torch.equal(values, fault_free.weights[name]):
            raise CPSRError(
                f"training again to iteration {failure} gave other weights (first in '{name}'): the machine does not "
                "compute the same twice, and no run could be paired with the one without failures; nothing is kept"
            )


def _weights(training: Training) -> dict[str, torch.Tensor]:
    return {name: one.parameter.values.clone() for name, one in training.adapter.shard().operators.items()}
