"""Time to make one plan for many ranks."""
