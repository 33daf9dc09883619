"""`cpsr run`: torchrun with what recovery needs, and the link between it and the processes that it starts."""
