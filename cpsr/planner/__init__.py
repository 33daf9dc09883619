"""When to take checkpoints, and which way back a failure takes, by expected cost."""
