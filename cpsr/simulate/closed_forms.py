"""ETTR without simulating: the formula of the field, and what is exact under Poisson failures."""

import math

__all__ = ["exact_ettr", "formula_ettr"]


def formula_ettr(
    iteration_seconds: float,
    interval_iterations: float,
    stall_seconds: float,
    recovery_seconds: float,
    mtbf_seconds: float,
) -> float:
    """`1 / (1 + T_ckpt / (T_iter I)) x 1 / (1 + E[R] / MTBF)`; it ignores failures during a recovery.

    Args:
        iteration_seconds: T_iter.
        interval_iterations: I.
        stall_seconds: T_ckpt, for each checkpoint.
        recovery_seconds: E[R]; `I T_iter / 2` where everyone goes back and nothing else is counted.
        mtbf_seconds: of the job.

    Source: moevement, section 2.4 and appendix C.
    """
    runtime = 1 + stall_seconds / (iteration_seconds * interval_iterations)
    return 1 / runtime / (1 + recovery_seconds / mtbf_seconds)


def exact_ettr(
    iteration_seconds: float,
    interval_iterations: float,
    stall_seconds: float,
    restart_seconds: float,
    mtbf_seconds: float,
) -> float:
    """Of a job under Poisson failures that goes back to its last checkpoint, at any rate of failures.

    A checkpoint is durable when its stall ends; failures may come during restarts and stalls. With
    w = I T_iter + T_s, a segment takes `M e^(R/M) (e^(w/M) - 1)` on average.

    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006, Eq. 13.
    """
    useful = iteration_seconds * interval_iterations
    segment = mtbf_seconds * math.exp(restart_seconds / mtbf_seconds)
    return useful / (segment * math.expm1((useful + stall_seconds) / mtbf_seconds))
