"""Python and the packages that CPSR runs on, compared with what it requires and what it was tested with."""

import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.version import Version

from cpsr.doctor.finding import Finding, error, ok, warning

__all__ = ["DISTRIBUTION", "TESTED", "TESTED_PYTHON", "check_packages", "check_python", "installed_versions"]

DISTRIBUTION = "cpsr"
TESTED_PYTHON = "3.11"
# Of constraints.txt; what recovery depends on most. Another release of the first two may bring other behaviour.
TESTED = {"torch": "2.13.0", "deepspeed": "0.19.8", "numpy": "2.4.6", "safetensors": "0.8.0", "pydantic": "2.14.3"}
WATCHED = ("torch", "deepspeed")


def check_python(found: str = platform.python_version(), optimised: bool = bool(sys.flags.optimize)) -> Finding:
    """The interpreter."""
    release = ".".join(found.split(".")[:2])
    if Version(release) < Version(TESTED_PYTHON):
        return error("python", f"Python {found}", f"CPSR needs {TESTED_PYTHON} or later", python=found)
    if optimised:
        advice = "CPSR's checks of its own state are assertions; run without -O and PYTHONOPTIMIZE"
        return warning("python", f"Python {found} without assertions", advice, python=found)
    if release != TESTED_PYTHON:
        advice = f"CPSR is tested with {TESTED_PYTHON}; `cpsr qualify` shows what works here"
        return warning("python", f"Python {found}", advice, python=found)
    return ok("python", f"Python {found}, as tested", python=found)


def check_packages(found: Mapping[str, str | None] | None = None) -> Finding:
    """The packages that CPSR requires.

    Args:
        found: name -> version, None where it is absent; by default what is installed.
    """
    try:
        needed = _requirements()
    except PackageNotFoundError:
        advice = "install it (`pip install .` in a clone), so that its requirements are known"
        return warning("packages", "CPSR runs from a folder and is not installed", advice)
    versions = installed_versions() if found is None else found
    wrong = [_wrong(one, versions.get(one.name)) for one in needed]
    wrong = [one for one in wrong if one]
    named = ", ".join(f"{name} {versions[name]}" for name in TESTED if versions.get(name))
    if wrong:
        advice = "install what is named, `pip install --constraint constraints.txt .` in a clone"
        return error("packages", "; ".join(wrong), advice, **versions)
    other = [name for name in TESTED if _public(versions[name]) != TESTED[name]]
    watched = [name for name in other if name in WATCHED and _minor(versions[name]) != _minor(TESTED[name])]
    if watched:
        tested = ", ".join(f"{name} {TESTED[name]}" for name in watched)
        advice = f"CPSR is tested with {tested}; `cpsr qualify` shows what works here"
        return warning("packages", named, advice, **versions)
    tested = "" if not other else f" (tested: {', '.join(f'{name} {TESTED[name]}' for name in other)})"
    return ok("packages", f"{named}{tested or ', as tested'}", **versions)


def installed_versions() -> dict[str, str | None]:
    """Name -> version of each package that CPSR requires, None where it is not installed."""
    try:
        names = [one.name for one in _requirements()]
    except PackageNotFoundError:
        names = list(TESTED)
    return {name: _version(name) for name in names}


def _requirements() -> list[Requirement]:
    """Without extras."""
    found = [Requirement(text) for text in requires(DISTRIBUTION) or []]
    return [one for one in found if one.marker is None or one.marker.evaluate({"extra": ""})]


def _wrong(needed: Requirement, found: str | None) -> str:
    """What is wrong with a package; empty where nothing is."""
    if found is None:
        return f"{needed.name} is not installed"
    if not needed.specifier.contains(Version(found), prereleases=True):
        return f"{needed.name} is {found}, CPSR needs {needed.specifier}"
    return ""


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _public(text: str | None) -> str:
    """Without the build: `2.13.0` of `2.13.0+cpu`."""
    return "" if text is None else Version(text).public


def _minor(text: str | None) -> tuple[int, int]:
    parsed = Version(text or "0")
    return parsed.major, parsed.minor
