"""CPSR: failure recovery for large-model training that restarts near the point of failure."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cpsr.errors import CPSRError
from cpsr.ranks.garbage import no_collections
from cpsr.ranks.link import report_errors

if TYPE_CHECKING:
    from cpsr.config import CPSRConfig
    from cpsr.engines.moe.token_counts import MixtureOfExperts
    from cpsr.engines.torch import TorchAdapter
    from cpsr.life.events import Committed, Leaving, Restored, RolledBack
    from cpsr.recovery import CPSRRecovery

report_errors()

__all__ = [
    "CPSRConfig",
    "CPSRError",
    "CPSRRecovery",
    "Committed",
    "Leaving",
    "MixtureOfExperts",
    "Restored",
    "RolledBack",
    "TorchAdapter",
]

# Loaded at first use, so that `import cpsr` (a service, a script that reads a journal) does not pay for torch.
_LAZY = {
    "CPSRConfig": "cpsr.config",
    "CPSRRecovery": "cpsr.recovery",
    "Committed": "cpsr.life.events",
    "Leaving": "cpsr.life.events",
    "MixtureOfExperts": "cpsr.engines.moe.token_counts",
    "Restored": "cpsr.life.events",
    "RolledBack": "cpsr.life.events",
    "TorchAdapter": "cpsr.engines.torch",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("cpsr")
    if name not in _LAZY:
        raise AttributeError(f"module 'cpsr' has no attribute {name!r}")
    with no_collections():
        return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
