"""The random states of a rank: the host's, its GPU's, and those that its engine keeps beside them."""

from typing import Any

from cpsr.engines.adapter import EngineAdapter
from cpsr.state.scalars import capture_rng, restore_rng

__all__ = ["capture_random_states", "restore_random_states"]


def capture_random_states(adapter: EngineAdapter) -> dict[str, Any]:
    """The states as plain data: those of `capture_rng`, and under `engine` the engine's own if it keeps any."""
    state, own = capture_rng(adapter.device), adapter.random_states()
    return {**state, "engine": own} if own else state


def restore_random_states(adapter: EngineAdapter, state: dict[str, Any]) -> str | None:
    """Restore what `capture_random_states` returned, also in an earlier version.

    Returns:
        What could not be restored, for people; None if all was.
    """
    notes = restore_rng(state, adapter.device), adapter.load_random_states(state.get("engine", {}))
    return "; ".join(note for note in notes if note is not None) or None
