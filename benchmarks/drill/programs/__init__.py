"""The training script of each way to come back; each is started by a launcher, on every rank."""
