"""Copies of committed checkpoints behind an fsspec URL: made in the background, fetched where the disk has none."""
