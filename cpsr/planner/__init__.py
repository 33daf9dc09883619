"""When to take checkpoints."""
