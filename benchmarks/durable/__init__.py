"""Processor time and time until a checkpoint is durable and verified."""
