"""Exact replay: sparse snapshots of every iteration, which become a whole state again while the loop repeats them."""
