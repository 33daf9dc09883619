"""The exceptions that CPSR raises on purpose, in one tree.

::

    CPSRError
    ├── ConfigError              a key or a value in the configuration is not usable
    │   └── RunDirectoryError        the run directory cannot be reached now; trying again may cure it
    ├── UnsupportedEngineError   state that CPSR cannot see into (an optimizer, an offload, a wrapper)
    ├── NotResumableError        a function, or a value in it, that cannot be saved and go on later
    ├── ResourceError            host memory or disk do not hold what the configuration asks for
    ├── RunMismatchError         the run directory belongs to another model or another world size
    ├── CheckpointError
    │   ├── CheckpointCorruptError   a committed file is torn, missing or altered
    │   └── SaveError                a save failed or was skipped; training goes on
    ├── UnevenRanksError         a rank has left its training loop, and others wait for it
    ├── RecoveryError            no source of state can be restored
    ├── WrongArithmeticError     a device of this rank has computed wrong results twice
    ├── NotRestoredError         a restart has repeated a step, and it differs from its first execution
    ├── TargetError              the target of copies cannot be read or written now
    └── JournalError             the journal cannot be read or has a newer schema
        └── JournalDamagedError      its file is damaged; the checkpoints are kept apart from it

Every message says what happened, where, what was kept, and what to do. Below it Python prints where docs/errors.md
explains its class.
"""

__all__ = [
    "CPSRError",
    "CheckpointCorruptError",
    "CheckpointError",
    "ConfigError",
    "JournalDamagedError",
    "JournalError",
    "NotRestoredError",
    "NotResumableError",
    "RecoveryError",
    "ResourceError",
    "RunDirectoryError",
    "RunMismatchError",
    "SaveError",
    "TargetError",
    "UnevenRanksError",
    "UnsupportedEngineError",
    "WrongArithmeticError",
]


class CPSRError(Exception):
    """Base of every exception that CPSR raises on purpose; its note names its section of docs/errors.md.

    The note is no part of `str(error)`, so that a message can stand inside another one.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.add_note(f"[{self.reference()}]")

    @classmethod
    def reference(cls) -> str:
        """Path and anchor of the section, `docs/errors.md#configerror`; a class of another module has its base's."""
        explained = next(base.__name__ for base in cls.__mro__ if base.__module__ == __name__)
        return f"docs/errors.md#{explained.lower()}"

    def one_line(self) -> str:
        """The message without line breaks, and its section: for where no traceback is printed."""
        return f"{' '.join(str(self).split())} [{self.reference()}]"


class ConfigError(CPSRError):
    """A key or a value of the configuration is not usable; the message names the key."""


class RunDirectoryError(ConfigError):
    """The file system of the run directory failed, or some rank does not see it (yet); nothing in it was changed."""


class UnsupportedEngineError(CPSRError):
    """The engine keeps state where CPSR cannot see it, so that a snapshot would be incomplete."""


class NotResumableError(CPSRError):
    """A function with hints, or a value in it, cannot be saved and go on later; the message names line and variable."""


class ResourceError(CPSRError):
    """Host memory or disk space is short; the message gives the bytes required and the bytes free."""


class RunMismatchError(CPSRError):
    """The run directory holds a run of another model or world size; nothing in it was touched."""


class CheckpointError(CPSRError):
    """Base of everything that can be wrong with a checkpoint."""


class CheckpointCorruptError(CheckpointError):
    """A file of a committed checkpoint is torn, missing or altered; the message names the file."""


class SaveError(CheckpointError):
    """A checkpoint could not be written; the previous ones are untouched and training goes on."""


class UnevenRanksError(CPSRError):
    """Another rank has left its training loop, so that it takes no part in this rank's next step or checkpoint."""


class RecoveryError(CPSRError):
    """The run has committed state but none of it could be restored; the message lists what was tried."""


class NotRestoredError(CPSRError):
    """A step that a restart repeats differs from its first execution, and `restart.on_difference` is `stop`."""


class WrongArithmeticError(CPSRError):
    """A repeated step showed twice that a device computes wrong results; the message names it.

    Attributes:
        alone: its machine leaves the job, and the others go on without it.
    """

    def __init__(self, message: str, *, alone: bool = False) -> None:
        super().__init__(message)
        self.alone = alone


class TargetError(CPSRError):
    """The target of checkpoint copies cannot be read or written now; the run directory is not affected."""


class JournalError(CPSRError):
    """The journal cannot be read, or was written by a newer version."""


class JournalDamagedError(JournalError):
    """The journal's file is torn or altered; checkpoints are kept apart from it and are not affected."""
