"""Results of papers, computed again by the simulator from what they state."""
