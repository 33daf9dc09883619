"""Sources of state after a failure, the choice among them, restoring and predicting."""
