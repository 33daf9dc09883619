"""The planner of a running job: what it measures, what it expects, and when it plans anew."""
