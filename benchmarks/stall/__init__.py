"""What a checkpoint costs the training thread."""
