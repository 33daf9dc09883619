"""Random states of DeepSpeed's activation checkpointing: a tracker keeps them by name, outside torch's generators.

Layers that are split over ranks draw from them, as `get_cuda_rng_tracker().fork()` offers it on every accelerator.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

__all__ = ["load_tracked_states", "preserved_tracked_states", "tracked_states"]


def tracked_states() -> dict[str, torch.Tensor]:
    """The states by name; none where the script added none."""
    states: dict[str, torch.Tensor] = get_cuda_rng_tracker().get_states()
    return states


def load_tracked_states(saved: dict[str, torch.Tensor]) -> str | None:
    """Put `tracked_states` back, of the names that the script has added.

    Adding the others here would make the script's own `add` fail.

    Returns:
        Which names could not be restored, for people; None if all were.
    """
    tracker = get_cuda_rng_tracker()
    own = tracker.get_states()
    fitting = {name: state for name, state in saved.items() if name in own and state.numel() == own[name].numel()}
    tracker.set_states({**own, **{name: state.clone() for name, state in fitting.items()}})
    other = sorted((saved.keys() | own.keys()) - fitting.keys())
    if not other:
        return None
    return (
        f"of DeepSpeed's random-state tracker {sorted(fitting) or 'nothing'} is restored, and {other} is not: it is "
        "either not in the checkpoint, or of another kind of device, or not added before CPSR restores"
    )


@contextmanager
def preserved_tracked_states() -> Iterator[None]:
    """The states are as before on exit."""
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    try:
        yield
    finally:
        tracker.set_states(states)
