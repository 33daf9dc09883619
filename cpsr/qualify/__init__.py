"""`cpsr qualify`: shows on a machine, engine by engine, that recovery works there."""
