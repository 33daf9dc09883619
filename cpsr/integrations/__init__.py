"""CPSR in the training loops of other packages, and its events in loggers; each imports only its own package."""
