"""What sparse windows cost while a job trains, what a restart repeats, and what a repeated iteration costs."""
