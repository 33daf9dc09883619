"""Prediction of the training state at a failure from the checkpoints before it."""
