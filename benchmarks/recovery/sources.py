"""Digests of the code that decides a result, so that a kept result is used as long as it would come out the same."""

import ast
import hashlib
import inspect
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import cpsr.predictor

__all__ = ["files_digest", "package_files", "predictor_files"]

PREDICTOR = Path(inspect.getfile(cpsr.predictor)).parent
BASELINES = Path(__file__).parent / "methods"
DIGEST_CHARACTERS = 12


def files_digest(files: Iterable[Path], settings: str = "") -> str:
    """Of the names and contents of files, and of what else decides."""
    hasher = hashlib.sha256(settings.encode())
    for path in sorted(set(files)):
        hasher.update(path.name.encode())
        hasher.update(path.read_bytes())
    return hasher.hexdigest()[:DIGEST_CHARACTERS]


def package_files(package: ModuleType) -> list[Path]:
    """All modules of a package."""
    return sorted(Path(inspect.getfile(package)).parent.glob("*.py"))


def predictor_files(start: Path) -> set[Path]:
    """A source file, and every module of a predictor that it rests on, however far its imports go."""
    found: set[Path] = set()
    rest = [start]
    while rest:
        path = rest.pop()
        if path not in found:
            found.add(path)
            rest += _used(path)
    return found


def _used(path: Path) -> list[Path]:
    """Modules of predictors that a file imports, and the tables beside it that it names or shares its own name with."""
    if path.suffix != ".py":
        return []
    text = path.read_text(encoding="utf-8")
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    modules = [
        folder / f"{name.removeprefix(prefix)}.py"
        for prefix, folder in (("cpsr.predictor.", PREDICTOR), ("cpsr.benchmarks.recovery.methods.", BASELINES))
        for name in names
        if name.startswith(prefix)
    ]
    tables = [
        beside
        for beside in PREDICTOR.iterdir()
        if beside.is_file() and beside.suffix != ".py" and (beside.name in text or beside.stem == path.stem)
    ]
    return [found for found in (*modules, *tables) if found.exists()]
