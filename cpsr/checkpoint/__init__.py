"""Snapshots, the committed store, the history for the predictor, and the step counter."""
