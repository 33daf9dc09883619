"""What grows with the number of ranks: files of simulated ranks, and groups of real processes."""
