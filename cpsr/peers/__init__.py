"""Replicas of snapshots in the host memory of other nodes: where they lie, how they get there and back."""
