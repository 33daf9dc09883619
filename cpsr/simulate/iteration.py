"""The time of one iteration of a job in pipeline and data parallelism (moevement, appendix C)."""

from collections.abc import Sequence
from dataclasses import dataclass

from cpsr.experts import sparse_window

__all__ = ["Collective", "Pipeline", "iteration_seconds", "sparse_window_iterations"]


@dataclass(frozen=True)
class Collective:
    """An operation of a group, affine in its message: `alpha + beta m`.

    Attributes:
        alpha_seconds: of an empty message, for this group's size.
        beta_seconds_per_byte: more for each byte.
        message_bytes: its size.
        overlap_fraction: part of it that computation hides.
    """

    alpha_seconds: float
    beta_seconds_per_byte: float
    message_bytes: float
    overlap_fraction: float = 0.0

    @property
    def exposed_seconds(self) -> float:
        """Time that nothing hides."""
        whole = self.alpha_seconds + self.beta_seconds_per_byte * self.message_bytes
        return whole * (1 - self.overlap_fraction)


@dataclass(frozen=True)
class Pipeline:
    """One data-parallel replica.

    Attributes:
        micro_batches: M, in one iteration.
        stage_seconds: forward, backward and local communication of one micro-batch, for each stage.
    """

    micro_batches: int
    stage_seconds: Sequence[float]

    @property
    def seconds(self) -> float:
        """`(M + S - 1) max t_s`, the time of an interleaved 1F1B schedule of S stages."""
        return (self.micro_batches + len(self.stage_seconds) - 1) * max(self.stage_seconds)


def iteration_seconds(
    pipelines: Sequence[Pipeline], synchronisation: Sequence[Collective] = (), update_seconds: float = 0.0
) -> float:
    """The slowest pipeline, then what of the collectives nothing hides, then the update.

    Source: moevement, appendix C, "Estimating Iteration-time".
    """
    exposed = sum(collective.exposed_seconds for collective in synchronisation)
    return max(pipeline.seconds for pipeline in pipelines) + exposed + update_seconds


def sparse_window_iterations(
    operators: int, full_bytes: float, compute_bytes: float, bytes_per_second: float, seconds: float
) -> int:
    """W, iterations over which a sparse checkpoint spreads so that no snapshot takes longer than an iteration.

    Args:
        operators: that are snapshotted one by one, all of one size.
        full_bytes: of one operator's master weights and optimizer state.
        compute_bytes: of one operator's weights for forward and backward.
        bytes_per_second: from device to host.
        seconds: of one iteration.

    Source: moevement, Algorithm 1, `FindWindowSize`.
    """
    found = sparse_window([full_bytes] * operators, [compute_bytes] * operators, seconds, bytes_per_second)
    # Two at a time is the least the algorithm takes as printed, whether or not they fit.
    return -(-operators // max(found.active_per_step, 2))
