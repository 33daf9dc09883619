"""Copies of committed checkpoints at an fsspec URL: made in the background, fetched where the disk has none."""
