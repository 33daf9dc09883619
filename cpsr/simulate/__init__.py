"""What failures cost a job, simulated: many runs at once, failure by failure."""
