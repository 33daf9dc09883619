"""What is compared, by name, and the aim for stalls: known to the jobs and to those who read what they measured."""

__all__ = [
    "ADAPTIVE",
    "CATCH_UP",
    "CATCH_UP_NOTHING",
    "EACH",
    "EQUAL",
    "EVERYTHING",
    "MADE_UP",
    "MODES",
    "MOETION",
    "STALE",
    "STALL_AIM",
    "TURNS",
]

# What becomes of experts that are older than the checkpoint: they stay so; with more capacity until what they lost is
# made up; with steps twice as long for as long.
STALE, MADE_UP, CATCH_UP = "stale", "stale, 10% capacity", "stale, catching up"
# Every expert is as it was at the checkpoint, and the same ones take the same longer steps: what these alone do.
CATCH_UP_NOTHING = "whole, the same steps"
# By what the command line calls them, in the order in which they are measured.
MODES = {
    "stale": STALE,
    "more_capacity": MADE_UP,
    "catch_up": CATCH_UP,
    "catch_up_whole": CATCH_UP_NOTHING,
}
# What a snapshot after every iteration copies.
EVERYTHING, TURNS = "all experts", "experts in turn"
# Who writes what ranks hold alike: each of them; or one, always the same, or by the experts of a checkpoint.
EACH, EQUAL, ADAPTIVE = "each rank", "equal shares", "shares by experts"
MOETION = "MOETION"
STALL_AIM = 0.02  # of a step, that these snapshots may add
