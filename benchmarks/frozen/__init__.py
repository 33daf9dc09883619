"""What frozen weights cost in checkpoints."""
