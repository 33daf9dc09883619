"""What a recovery costs: persistent lag and transient of every way to come back, on paired data."""
