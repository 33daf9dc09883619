"""What sparse windows of snapshots cost while a job trains, and what a restart repeats."""
