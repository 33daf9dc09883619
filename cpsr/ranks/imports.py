"""What a rank has imported, for a process that imports the same beforehand: see `cpsr.launch.warm`."""

import os
import site
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType

__all__ = ["STARTED_WITH", "Imported", "file_of", "imported", "is_of_environment"]

STARTED_WITH = dict(os.environ)  # before the script changes anything

# Whose names are looked up when they are used: a function of the user there is no function that an import has copied.
LOOKED_UP = ("builtins", "sys", "warnings")
_PACKAGE = f"{Path(__file__).parent.parent}{os.sep}"


@dataclass(frozen=True)
class Imported:
    """The modules of a rank, and what its script did that imports may have seen.

    Attributes:
        modules: their files by name, in the order of their imports; empty for one without a file.
        main: the file of `__main__`.
        path: where imports look.
        environment: variables that the process has changed since it started; None: removed.
        replaced: names in modules of the environment that the user's code has given other values.
    """

    modules: dict[str, str]
    main: str
    path: list[str]
    environment: dict[str, str | None]
    replaced: list[str]


def imported() -> Imported:
    """What this process has imported."""
    loaded = [(name, module) for name, module in list(sys.modules.items()) if name != "__main__"]
    changed = {
        name: os.environ.get(name)
        for name in sorted({*STARTED_WITH, *os.environ})
        if STARTED_WITH.get(name) != os.environ.get(name)
    }
    return Imported(
        {name: file_of(name, module) for name, module in loaded},
        str(getattr(sys.modules["__main__"], "__file__", "")),
        [os.path.abspath(path) for path in sys.path],  # noqa: PTH100
        changed,
        _replaced(dict(loaded)),
    )


def file_of(name: str, module: ModuleType | None) -> str:
    """Where a module came from; empty if no finder has found it under this name."""
    spec = getattr(module, "__spec__", None)
    return str(getattr(spec, "origin", None) or "") if getattr(spec, "name", "") == name else ""


def is_of_environment(name: str, file: str) -> bool:
    """Whether a module is Python's, an installed one or CPSR's: one that the user does not write."""
    return file in ("built-in", "frozen") or (file.startswith(_FOLDERS) if file else name in sys.builtin_module_names)


def _folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    found = {*site.getsitepackages(), site.getusersitepackages()}
    found |= {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return (*(f"{path}{os.sep}" for path in sorted(found)), _PACKAGE)


_FOLDERS = _folders()


def _replaced(loaded: Mapping[str, ModuleType]) -> list[str]:
    """Classes and functions of the user in modules of the environment: later imports have copied them."""
    files = {name: file_of(name, module) for name, module in loaded.items()}
    users = {"__main__", *(name for name, file in files.items() if file and not is_of_environment(name, file))}
    found = []
    for name, module in loaded.items():
        if files[name] and name not in users and name not in LOOKED_UP:
            for attribute, value in list(vars(module).items()):
                kind = type(value)  # isinstance would ask the value, and some warn
                if (kind is FunctionType or issubclass(kind, type)) and value.__module__ in users:
                    found.append(f"{name}.{attribute}")
    return found
