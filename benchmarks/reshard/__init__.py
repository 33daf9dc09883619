"""What it costs to load a checkpoint on another number of ranks."""
