"""Costs that papers give in closed form, with the assumptions that each of them makes."""


def lost_work_seconds(
    iteration_seconds: float, interval_iterations: float, stall_seconds: float, persist_seconds: float = 0.0
) -> float:
    """Mean training time that a failure takes back where failures are rare and persisting ends within the interval.

    For an interval of k seconds: a failure in the stall s loses k, and one later the time since. One before the newest
    checkpoint is durable loses another k. Together: `k (k/2 + s + p) / (k + s)`.
    """
    trained = iteration_seconds * interval_iterations
    return trained * (trained / 2 + stall_seconds + persist_seconds) / (trained + stall_seconds)


def pccheck_failure_seconds(
    iteration_seconds: float, interval_iterations: float, load_seconds: float, persist_seconds: float, slots: int
) -> float:
    """`L + k t / 2 + t min(T_w / t, k N) / 2`, what PCcheck's own code expects of a failure.

    It halves the persist time, as if the newest checkpoint were durable at once in the best case. Where a checkpoint
    takes `T_w` whenever it is written, the mean loss has all of it: see `lost_work_seconds`.

    Source: PCcheck's code (F. Strati et al., "PCcheck: Persistent concurrent checkpointing for ML", 2025).
    """
    behind = min(persist_seconds / iteration_seconds, interval_iterations * slots)
    return load_seconds + iteration_seconds * (interval_iterations + behind) / 2


def checkpoint_overhead_seconds(
    save_seconds: float,
    iterations: float,
    interval_iterations: float,
    failures: float,
    restart_seconds: float,
    iteration_seconds: float,
) -> float:
    """`O_save I_total / I_ckpt + sum (O_restart + O_lost)` with `O_lost = I_ckpt / 2` iterations on average.

    Source: PEC (Partial Experts Checkpoint), Eq. 3.
    """
    lost = iteration_seconds * interval_iterations / 2
    return save_seconds * iterations / interval_iterations + failures * (restart_seconds + lost)


def wasted_seconds(
    save_seconds: float, retrieval_seconds: float, interval_iterations: float, iteration_seconds: float
) -> float:
    """`T_ckpt + T_retrieval + f_ckpt / 2 x T_iteration`, lost with one failure; f_ckpt is an interval in iterations.

    Source: MOETION, section 7.2.
    """
    return save_seconds + retrieval_seconds + interval_iterations / 2 * iteration_seconds


def recovery_bounds_iterations(window_iterations: int) -> tuple[int, float, int]:
    """Least, mean and most iterations repeated after a failure under sparse checkpoints: `0, 3/2 W, 2 W`.

    Source: moevement, section 3.6.
    """
    return 0, 1.5 * window_iterations, 2 * window_iterations
