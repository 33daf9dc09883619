"""The warm process of `cpsr run`: imports what the ranks had imported, waits, and forks itself for each new rank.

It is started like a rank, with the rank's own command line, and stops inside `sitecustomize`, before the script. A fork
of it returns from there: Python itself then runs the script, as it does in a fresh rank.
"""

import ctypes
import gc
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

from cpsr.ranks.imports import STARTED_WITH, Imported, file_of, is_of_environment

__all__ = ["PR_SET_CHILD_SUBREAPER", "WARM", "become_rank", "prctl"]

WARM = "CPSR_WARM"  # the descriptor of the warm process's socket; no rank has this variable
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h
# Variables that libraries read outside Python, or find among all by their prefix.
PREFIXES = ("ATEN_", "FSSPEC_", "GOMP_", "GOTO_", "KMP_", "MKL_", "OMP_", "OPENBLAS_", "PYTORCH_", "TORCH_", "TQDM_")
BLAS_THREADS = "OPENBLAS_NUM_THREADS"  # its threads start when it is loaded
_BLAS_SETTERS = [f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_")]


class _Environment(type(os.environ)):  # type: ignore[misc]
    """`os.environ` while modules are imported: notes what they read and write, but not the reading of all variables."""

    read: ClassVar[set[str]] = set()
    written: ClassVar[set[str]] = set()
    _in_turn: ClassVar[list[str]] = []  # the next ones, last first, of somebody who reads all

    def __getitem__(self, key: str) -> str:
        if self._in_turn[-1:] == [key]:
            self._in_turn.pop()
        else:
            self._in_turn.clear()
            self.read.add(str(key))  # os.get_exec_path tries bytes
        value: str = super().__getitem__(key)
        return value

    def __setitem__(self, key: str, value: str) -> None:
        self.written.add(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self.written.add(key)
        super().__delitem__(key)

    def __iter__(self) -> Iterator[str]:
        keys = list(super().__iter__())
        for key in keys:
            self._in_turn[:] = [key]
            yield key
        self._in_turn[:] = keys[::-1]  # `dict` asks for the values afterwards


class _Seeds:
    """Generators of Python that were seeded by chance while this was installed: forks must not share their numbers."""

    def __init__(self) -> None:
        self.by_chance: WeakSet[random.Random] = WeakSet()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within this context, watch all of them."""
        original, by_chance = random.Random.seed, self.by_chance

        def seed(generator: random.Random, a: Any = None, version: int = 2) -> None:
            original(generator, a, version)
            by_chance.add(generator) if a is None else by_chance.discard(generator)

        random.Random.seed = seed  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            random.Random.seed = original  # type: ignore[method-assign]


class _Imports:
    """What this process has imported, and whether a fork of it can be a rank.

    Args:
        imported: what the rank had imported.
    """

    def __init__(self, imported: Imported) -> None:
        self._imported = imported
        self._blas_threads = os.environ.get(BLAS_THREADS)
        self._open = _open_files()
        files = {file for name, file in imported.modules.items() if is_of_environment(name, file)} | {imported.main}
        self._stats = {file: _stat(file) for file in files}
        self._beside = self._names_beside()
        self._before = set(sys.modules)
        self._seeds = _Seeds()
        self._kept: list[str] = []  # variables as the imports left them

    def obstacle(self) -> str | None:
        """Import everything; return why no fork of this process can be a rank, or None."""
        if self._imported.replaced:
            return f"the script replaces {', '.join(self._imported.replaced[:3])}, which imports may have copied"
        try:
            self._import()
            return next(chain(self._other_modules(), self._unsafe(), self._settings()), None)
        except BaseException as error:  # noqa: BLE001 - a module may raise anything; a fresh rank then shows it
            return f"its imports failed ({type(error).__name__}: {error})"

    def changed(self) -> str | None:
        """A file that is not as it was before the imports; None if there is none."""
        beside = sorted(self._names_beside() ^ self._beside)
        return next((file for file, was in self._stats.items() if _stat(file) != was), beside[0] if beside else None)

    def restore(self, environment: Mapping[str, str]) -> None:
        """In a fork: the state that a fresh rank has after the same imports.

        Args:
            environment: that the rank is given.
        """
        left = {name: os.environ.get(name) for name in self._kept}
        os.environ.clear()
        STARTED_WITH.clear()
        os.environ.update({**environment, **{name: value for name, value in left.items() if value is not None}})
        for name, value in left.items():
            if value is None:
                os.environ.pop(name, None)
        STARTED_WITH.update(environment)
        multiprocessing.current_process().authkey = os.urandom(32)
        for generator in self._seeds.by_chance:
            generator.seed()
        torch: Any = sys.modules.get("torch")
        if torch is not None and torch.initial_seed() >> 32:  # as by chance; seeds that somebody chose are smaller
            torch.default_generator.seed()
        if "numpy.random" in sys.modules:
            numpy_random: Any = sys.modules["numpy.random"]
            numpy_random.set_bit_generator(numpy_random.MT19937())
        wanted = _blas_threads(os.environ)
        for setter in _blas_setters() if wanted > 1 else ():
            setter(wanted)

    def _names_beside(self) -> set[str]:
        """What lies in the user's folders under the name of a module of the environment."""
        modules = self._imported.modules
        names = {name for name, file in modules.items() if "." not in name and is_of_environment(name, file)}
        found: set[str] = set()
        for folder in self._imported.path:
            if not is_of_environment("", f"{folder}{os.sep}") and os.path.isdir(folder):  # noqa: PTH112
                entries = os.listdir(folder)  # noqa: PTH208
                found |= {f"{folder}{os.sep}{entry}" for entry in entries if entry.partition(".")[0] in names}
        return found

    def _import(self) -> None:
        main: Any = sys.modules["__main__"]
        if self._imported.main:
            main.__file__ = self._imported.main  # some ask for it, to know whether Python is interactive
        # Modules are in the order in which their imports ended: a package that extends the path follows its parts.
        sys.path += [
            one for one in self._imported.path if one not in sys.path and is_of_environment("", f"{one}{os.sep}")
        ]
        os.environ[BLAS_THREADS] = "1"
        os.environ.__class__ = _Environment
        gc.disable()  # finds nothing while modules are loaded
        try:
            with self._seeds.installed():
                for name, file in self._imported.modules.items():
                    if file and name not in sys.modules and is_of_environment(name, file):
                        import_module(name)
                if "cpsr.journal.rows" in sys.modules:
                    known = set(sys.modules)
                    sys.modules["cpsr.journal.rows"].prepare()
                    self._before |= sys.modules.keys() - known  # ranks without a journal have not loaded these
        finally:
            gc.enable()
            os.environ.__class__ = _Environment.__base__
            vars(main).pop("__file__", None)
        self._kept = sorted(_Environment.written - {BLAS_THREADS})
        if self._blas_threads is None:
            os.environ.pop(BLAS_THREADS, None)
        else:
            os.environ[BLAS_THREADS] = self._blas_threads

    def _other_modules(self) -> Iterator[str]:
        """Modules that differ from those of the rank, since the user has one of that name, or that are the user's."""
        theirs = self._imported.modules
        for name, module in list(sys.modules.items()):
            file = file_of(name, module)
            if name in theirs and file != theirs[name]:
                yield f"{name} is {theirs[name] or 'made by the script'} in the ranks, and {file} without the script"
            elif name not in self._before and name not in theirs:
                yield f"its imports load {name}, and those of the ranks do not"
            elif name not in self._before and file.startswith(os.sep) and not is_of_environment(name, file):
                yield f"its imports load {name}, which is not installed"

    def _unsafe(self) -> Iterator[str]:
        """What forks would share, or lack."""
        if _entries("/proc/self/task") != 1:
            yield "an import started a thread"
        if Path(f"/proc/self/task/{os.getpid()}/children").read_text():
            yield "an import started a process"
        for descriptor, file in _open_files().items():
            if self._open.get(descriptor) != file:
                yield f"an import opened {file}"
        for line in Path("/proc/self/maps").read_text().splitlines():
            if line.split()[1].startswith("rw") and line.split()[1].endswith("s"):
                yield f"an import shares memory ({line.split(maxsplit=5)[-1]})"
        torch: Any = sys.modules.get("torch")
        if torch is not None and (torch.cuda.is_initialized() or _forks_without(torch)):
            yield "an import touched CUDA"
        tempfile: Any = sys.modules.get("tempfile")
        if tempfile is not None and tempfile._name_sequence is not None:  # the first fork that ends may remove it
            yield "an import made a temporary file or folder"
        yield from _random_generators()
        yield from _kept_environments()
        if _blas_threads(os.environ) > 1 and len(_blas_setters()) < len(_blas_files()):
            yield f"the threads of {_blas_files()[0]} cannot be set"

    def _settings(self) -> Iterator[str]:
        """Variables that the script sets, perhaps before its imports."""
        for name, value in self._imported.environment.items():
            if (name in _Environment.read or name.startswith(PREFIXES)) and (
                name not in self._kept or os.environ.get(name) != value
            ):
                yield f"the script sets {name}, which its imports read; set it in the environment of cpsr run"


def become_rank() -> None:
    """Import what a rank had imported, and wait; returns in each fork, which then is a rank."""
    connection = socket.socket(fileno=int(os.environ.pop(WARM)))
    connection.set_inheritable(False)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    request, _ = _receive(connection)
    if os.getppid() != request["launcher"]:
        os._exit(1)
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123 - what imports print, ranks have printed before
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    imports = _Imports(Imported(**request["imported"]))
    obstacle = imports.obstacle()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    ctypes.CDLL(None).fflush(None)  # or each fork would print what C's streams hold
    _send(connection, {"obstacle": obstacle, "read": sorted(_Environment.read)})
    while True:
        request, descriptors = _receive(connection)
        if "environment" not in request:
            _send(connection, {"changed": imports.changed()})
        elif _is_fork(connection):
            try:
                imports.restore(request["environment"])
                _begin(connection, descriptors)
            except BaseException as error:  # noqa: BLE001 - the script must not run in another state
                _send(connection, {"failed": f"{type(error).__name__}: {error}"})
                os._exit(1)
            return
        for descriptor in descriptors:
            os.close(descriptor)


def _is_fork(connection: socket.socket) -> bool:
    """Fork; True in the fork, which gets the launcher as its parent. The launcher is told its process id."""
    try:
        between = os.fork()
    except OSError as error:
        _send(connection, {"failed": str(error)})
        return False
    if between:
        status = os.waitpid(between, 0)[1]  # then its child has the launcher as its parent
        _send(connection, {"failed": "a fork of a fork"} if status else {"forked": True})
        return False
    try:
        rank = os.fork()
    except OSError:
        os._exit(1)
    if rank:
        _send(connection, {"pid": rank})
        os._exit(0)
    return True


def _begin(connection: socket.socket, descriptors: list[int]) -> None:
    """Become the leader of a session, with the streams of the rank, once the launcher lets it go.

    Args:
        connection: to the launcher.
        descriptors: standard output and error of the rank, and a pipe by which the launcher lets it go.
    """
    os.setsid()
    out, error, go = descriptors
    os.dup2(out, 1)
    os.dup2(error, 2)
    stdout: Any = sys.stdout
    if not stdout.write_through:
        stdout.reconfigure(line_buffering=os.isatty(1))
    _send(connection, {"ready": True})
    if not os.read(go, 1):
        os._exit(1)  # the launcher does not want it
    connection.close()
    for descriptor in descriptors:
        os.close(descriptor)


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process.

    Raises:
        OSError: the system refuses.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A request of the launcher, whose content is in a file, and descriptors; ends this process with the launcher."""
    said, descriptors, _, _ = socket.recv_fds(connection, 1, 8)
    if not said:
        os._exit(0)
    with os.fdopen(descriptors[0], "rb") as content:
        content.seek(0)
        request: dict[str, Any] = json.load(content)
    return request, descriptors[1:]


def _send(connection: socket.socket, message: Mapping[str, object]) -> None:
    try:
        connection.send(json.dumps(message).encode())
    except OSError:
        os._exit(0)  # the launcher has ended


def _stat(file: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(file)  # noqa: PTH116 - thousands of them
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev


def _open_files() -> dict[str, str]:
    """Files by descriptor."""
    folder = "/proc/self/fd"
    descriptors = os.listdir(folder)  # noqa: PTH208 - with its own descriptor, which is closed by now
    return {one: os.readlink(f"{folder}/{one}") for one in descriptors if os.path.lexists(f"{folder}/{one}")}  # noqa: PTH115


def _entries(folder: str) -> int:
    return len(os.listdir(folder))  # noqa: PTH208


def _forks_without(torch: Any) -> bool:
    """Whether forks cannot use CUDA."""
    child = os.fork()
    if not child:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitpid(child, 0)[1] != 0


def _random_generators() -> Iterator[str]:
    """NumPy's generators that forks would share: all but the one that `restore` replaces."""
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is None:
        return
    kinds = tuple(getattr(numpy_random, name) for name in ("Generator", "RandomState", "BitGenerator"))
    ours = (numpy_random.mtrand._rand, numpy_random.get_bit_generator())
    for found in gc.get_objects():
        kind = type(found)  # isinstance would ask the object, and some warn
        if issubclass(kind, kinds) and not any(found is one for one in ours):
            yield f"an import made a random generator ({kind.__module__}.{kind.__name__})"


def _kept_environments() -> Iterator[str]:
    """Copies of the environment, which differs in each start."""
    for holder in gc.get_objects():
        for name, value in list(holder.items()) if type(holder) is dict else ():
            if type(value) is dict and value is not STARTED_WITH and "TORCHELASTIC_RUN_ID" in value:
                yield f"an import keeps the environment ({holder.get('__name__', '')}.{name})"


def _blas_files() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split(maxsplit=5)[-1] for line in lines if "openblas" in line.rpartition(os.sep)[2]})


def _blas_setters() -> list[Any]:
    """What sets the number of threads in each OpenBLAS of this process."""
    libraries = [ctypes.CDLL(file) for file in _blas_files()]
    return [found[0] for library in libraries if (found := _named(library))]


def _named(library: Any) -> list[Any]:
    return [getattr(library, name) for name in _BLAS_SETTERS if hasattr(library, name)]


def _blas_threads(environment: Mapping[str, str]) -> int:
    """The threads that OpenBLAS starts with."""
    for name in (BLAS_THREADS, "OPENBLAS_DEFAULT_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS"):
        digits = environment.get(name, "").partition(",")[0].strip()
        if digits.isdecimal() and int(digits):
            return min(int(digits), len(os.sched_getaffinity(0)))
    return len(os.sched_getaffinity(0))
