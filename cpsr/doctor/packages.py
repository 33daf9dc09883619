"""Python and the packages that CPSR runs on, compared with what it requires and what it was tested with."""

import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.version import Version

from cpsr.doctor.finding import Finding, error, ok, warning

__all__ = ["DISTRIBUTION", "TESTED", "TESTED_PYTHONS", "TESTED_RELEASES"]
__all__ += ["check_packages", "check_python", "installed_versions"]

DISTRIBUTION = "cpsr"
# Of the matrix in docs/versions.md; another release of these may bring other behaviour.
TESTED_PYTHONS = ("3.11", "3.12", "3.13")
TESTED_RELEASES = {"torch": ("2.6", "2.9", "2.13"), "deepspeed": ("0.19",)}
# Of constraints.txt; what recovery depends on most.
TESTED = {"torch": "2.13.0", "deepspeed": "0.19.8", "numpy": "2.4.6", "safetensors": "0.8.0", "pydantic": "2.14.3"}


def check_python(found: str = platform.python_version(), optimised: bool = bool(sys.flags.optimize)) -> Finding:
    """The interpreter."""
    if Version(_release(found)) < Version(TESTED_PYTHONS[0]):
        return error("python", f"Python {found}", f"CPSR needs {TESTED_PYTHONS[0]} or later", python=found)
    if optimised:
        advice = "CPSR's checks of its own state are assertions; run without -O and PYTHONOPTIMIZE"
        return warning("python", f"Python {found} without assertions", advice, python=found)
    if _release(found) not in TESTED_PYTHONS:
        advice = f"CPSR is tested with {_listed(TESTED_PYTHONS)}; `cpsr qualify` shows what works here"
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
    untested = [name for name, releases in TESTED_RELEASES.items() if _release(versions[name]) not in releases]
    if untested:
        tested = ", ".join(f"{name} {_listed(TESTED_RELEASES[name])}" for name in untested)
        advice = f"CPSR is tested with {tested}; `cpsr qualify` shows what works here"
        return warning("packages", named, advice, **versions)
    other = [name for name in TESTED if name not in TESTED_RELEASES and _public(versions[name]) != TESTED[name]]
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


def _release(text: str | None) -> str:
    """`2.13` of `2.13.0+cpu`."""
    parsed = Version(text or "0")
    return f"{parsed.major}.{parsed.minor}"


def _listed(releases: Sequence[str]) -> str:
    return " and ".join(part for part in (", ".join(releases[:-1]), releases[-1]) if part)
