"""What the wrapper costs on steps without a checkpoint."""
