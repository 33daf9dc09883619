"""One open run in a process: a second one would share its hooks, its groups of ranks and its names in shared memory."""

import os
import threading

from cpsr.errors import ConfigError

__all__ = ["ProcessSlot"]


class ProcessSlot:
    """What one run of this process holds while it is open; a forked process has its own.

    Args:
        run_dir: of the run, for messages.
    """

    _lock = threading.Lock()
    _holder: "tuple[int, ProcessSlot] | None" = None  # with the process that it was taken in

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir

    def take(self) -> None:
        """Begin to hold it.

        Raises:
            ConfigError: another run is open in this process; it goes on as it was.
        """
        with ProcessSlot._lock:
            held = ProcessSlot._holder
            if held is not None and held[0] == os.getpid():
                raise ConfigError(
                    f"a run is open in this process already (run_dir {held[1]._run_dir}), and CPSR follows one engine "
                    f"in a process: this second one (run_dir {self._run_dir}) was not opened, and the first goes on as "
                    "it was. For several models in one job give one engine all that it trains: "
                    "TorchAdapter(model, [optimizer, optimizer]) takes several optimizers, and recovery.register(name, "
                    "module) saves and restores another module or optimizer. To open one run after the other, leave "
                    "the `with` block of the first before"
                )
            ProcessSlot._holder = os.getpid(), self

    def give_back(self) -> None:
        """Let another run be opened; without holding it nothing happens."""
        with ProcessSlot._lock:
            if ProcessSlot._holder is not None and ProcessSlot._holder[1] is self:
                ProcessSlot._holder = None
