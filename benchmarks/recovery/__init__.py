"""What a recovery costs by the end of the training, by every way to come back, on paired data."""
