"""CPSR in the training loops of other packages; each imports only its own package."""
