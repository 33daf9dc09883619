"""What is compared, by name, and the aim for stalls: known to the jobs and to those who read what they measured."""

__all__ = [
    "EVERYTHING",
    "MADE_UP",
    "MOETION",
    "PREDICT",
    "PREDICTED",
    "PREDICT_PLAINLY",
    "STALE",
    "STALL_AIM",
    "WINDOW",
]

# What becomes of experts that are older than the checkpoint: they stay so; with more capacity until what they lost is
# made up; they are predicted, as far ahead as the prior expects least lag of; or exactly up to the checkpoint.
STALE, MADE_UP, PREDICT, PREDICT_PLAINLY = "stale", "stale, 10% capacity", "predict", "predict, gain 1"
PREDICTED = (PREDICT, PREDICT_PLAINLY)
# Ways to choose operators for a snapshot after every iteration, beside the policies.
EVERYTHING, WINDOW = "everything", "window"
MOETION = "MOETION"
STALL_AIM = 0.03  # of a step, that these snapshots may add
