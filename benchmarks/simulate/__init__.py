"""Jobs under simulated failures: policies side by side, and the planner against brute force."""
