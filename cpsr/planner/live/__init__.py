"""The planner of a running job: its measurements, its expectations, and when it replans."""
