"""What the checkpoint store survives: kills at every write, errors of the file system, and damage to its files."""
