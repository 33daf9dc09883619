"""The `cpsr` command."""
