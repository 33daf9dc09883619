"""`cpsr rehearse`: runs the user's own script, cuts it short and restarts it, and compares every step."""
