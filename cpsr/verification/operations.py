"""Which operation of torch differs first between two executions of a step."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from cpsr.engines.recorded_step import Fingerprint
from cpsr.verification.evidence import Fingerprints

__all__ = ["first_difference"]


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the name of each operation, and fingerprints of its results."""

    def __init__(self, fingerprint: Fingerprint) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fingerprint = fingerprint
        self._busy = False
        self.found: dict[str, Any] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if self._busy or "empty" in str(function):  # whose results are what the memory held
            return result
        self._busy = True
        try:
            tensors = [one for one in tree_flatten(result)[0] if isinstance(one, torch.Tensor)]
            for number, one in enumerate(tensors):
                if one.layout is torch.strided and not one.is_meta:
                    self.found[f"{len(self.found)} {function} {number}"] = self._fingerprint(one)
        finally:
            self._busy = False
        return result


def first_difference(
    restore: Callable[[], object], execute: Callable[[], object], fingerprint: Fingerprint
) -> str | None:
    """Execute a step twice more, and name the first operation with other results; None where all are equal.

    Args:
        restore: goes back to before the step.
        execute: it.
        fingerprint: of a tensor.
    """
    runs = []
    for _ in range(2):
        restore()
        with _Operations(fingerprint) as operations:
            execute()
        runs.append(Fingerprints.settled(operations.found))
    for (name, one), (other_name, other) in zip(runs[0].items(), runs[1].items(), strict=False):
        if name != other_name or one != other:
            number, operation, _ = name.split()
            return f"{operation}, operation {number} of {len(runs[0])}"
    return None
