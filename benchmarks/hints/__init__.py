"""What resumable functions cost, and what a failure repeats of them."""
