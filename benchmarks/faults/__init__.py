"""What the checkpoint store and live jobs survive: kills at every write, errors, damage, signals at every moment."""
