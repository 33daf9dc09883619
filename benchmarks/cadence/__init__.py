"""What snapshots to host memory cost, and what they save."""
