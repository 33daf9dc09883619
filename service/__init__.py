"""The HTTP service over a run directory."""
