"""`cpsr doctor`, and the cheap checks of a machine that every job makes when it starts."""
