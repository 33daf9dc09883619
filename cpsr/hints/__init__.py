"""Which of the places where a program could take a checkpoint should be checkpoints."""
