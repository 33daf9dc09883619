"""Committed checkpoints in the formats of others: a DeepSpeed universal checkpoint, a state dict in safetensors."""
