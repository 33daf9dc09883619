"""Rehearsals: recoveries tested in the running job, after which the exact state is restored."""
