"""Measurements: one folder a scenario; only the command line imports them."""
