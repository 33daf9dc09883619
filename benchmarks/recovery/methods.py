"""The ways to come back that are compared, by name."""

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import cpsr.predictor
from cpsr.errors import ConfigError
from cpsr.predictor.baselines import BASELINES, ORACLE, RECOMPUTE
from cpsr.predictor.line import LinePredictor
from cpsr.predictor.protocol import StatePredictor

__all__ = ["HARNESS", "ORACLE", "PREDICTORS", "RECOMPUTE", "STALE", "find_methods", "predictor_source", "source_digest"]

STALE = "stale"  # what every method is paired with, beside recomputing
# Recomputing costs the horizon by definition, and is not run; the oracle's cost is the error of the measurement.
HARNESS = (RECOMPUTE, ORACLE)


def _baseline(name: str) -> Callable[[int], StatePredictor]:
    return lambda interval: BASELINES[name]()


# A predictor for a checkpoint interval in iterations. The first two count their window in checkpoints, the others in
# iterations, whatever the interval.
PREDICTORS: dict[str, Callable[[int], StatePredictor]] = {
    **{name: _baseline(name) for name in BASELINES if name not in HARNESS},
    "line-6-x2": lambda interval: LinePredictor(6 * interval, gain=2.0, base="checkpoint"),
    "line-8-1.5": lambda interval: LinePredictor(8 * interval, gain=1.5, base="line"),
}

DIGEST_CHARACTERS = 12


def find_methods(names: Iterable[str] | None) -> tuple[str, ...]:
    """Names of methods, checked; None is every one.

    Raises:
        ConfigError: there is no method of that name.
    """
    known = (RECOMPUTE, *PREDICTORS, ORACLE)
    if names is None:
        return known
    chosen = tuple(dict.fromkeys(names))
    for name in chosen:
        if name not in known:
            raise ConfigError(f"no method is called '{name}'; there are {', '.join(known)}")
    return chosen


def predictor_source() -> str:
    """Digest of everything that decides what a method predicts: the predictor's source and this file."""
    return source_digest(cpsr.predictor, sys.modules[__name__])


def source_digest(*modules: ModuleType) -> str:
    """Digest of the source of modules; of a package, of all of its modules."""
    hasher = hashlib.sha256()
    for module in modules:
        file = Path(inspect.getfile(module))
        for path in sorted(file.parent.glob("*.py")) if file.name == "__init__.py" else [file]:
            hasher.update(path.name.encode())
            hasher.update(path.read_bytes())
    return hasher.hexdigest()[:DIGEST_CHARACTERS]
