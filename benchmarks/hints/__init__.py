"""What a failure of a resumable function repeats, beside checkpoints at even distances."""
