"""The main job end to end: train, kill, recover, compare."""
