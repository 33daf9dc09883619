"""How long a restart takes to its first batch, far into the data."""
