"""When a rank saves, and the result; capture of the small state."""
