"""Loss curves."""
