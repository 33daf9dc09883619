"""Checks of a machine and of the job on it: `cpsr doctor`, and the cheap part of it when a job starts."""
