"""One open run in a process: a second one would share its hooks, its groups of ranks and its names in shared memory."""

import os
import threading
from collections.abc import Callable

from cpsr.errors import ConfigError

__all__ = ["ProcessSlot"]


class ProcessSlot:
    """What one run of this process holds while it is open; a forked process has its own, and the run is not its.

    Args:
        run_dir: of the run, for messages.
        disown: called in each process that is forked while the run is open, before anything else runs there.
    """

    _lock = threading.Lock()
    _holder: "ProcessSlot | None" = None

    def __init__(self, run_dir: str, disown: Callable[[], object]) -> None:
        self._run_dir = run_dir
        self._disown = disown

    def take(self) -> None:
        """Begin to hold it.

        Raises:
            ConfigError: another run is open in this process; it goes on as it was.
        """
        with ProcessSlot._lock:
            held = ProcessSlot._holder
            if held is not None:
                raise ConfigError(
                    f"a run is open in this process already (run_dir {held._run_dir}), and CPSR follows one engine "
                    f"in a process: this second one (run_dir {self._run_dir}) was not opened, and the first goes on as "
                    "it was. For several models in one job give one engine all that it trains: "
                    "TorchAdapter(model, [optimizer, optimizer]) takes several optimizers, and recovery.register(name, "
                    "module) saves and restores another module or optimizer. To open one run after the other, leave "
                    "the `with` block of the first before"
                )
            ProcessSlot._holder = self

    def give_back(self) -> None:
        """Let another run be opened; without holding it nothing happens."""
        with ProcessSlot._lock:
            if ProcessSlot._holder is self:
                ProcessSlot._holder = None

    @classmethod
    def forked(cls) -> None:
        """This process is a fork of one that may hold a run."""
        cls._lock = threading.Lock()
        holder, cls._holder = cls._holder, None
        if holder is not None:
            holder._disown()


os.register_at_fork(after_in_child=ProcessSlot.forked)
