"""`pip install` brings what the package imports, and nothing else."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib.metadata import packages_distributions

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packaging.distributions import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
FASTAPI = {"starlette"}  # which it is made of
MOTO = {"werkzeug"}  # as starlette


def required(lines: Iterable[str]) -> set[str]:
    """Names of distributions."""
    return {canonicalize_name(Requirement(line).name) for line in lines}


def imported(*folders: str) -> set[str]:
    """Distributions that the Python files of these folders import, anywhere in them; tests are left out."""
    modules = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py") if "tests" not in path.parts):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                modules.add((node.module or "").partition(".")[0])
    brought = packages_distributions()
    foreign = modules - sys.stdlib_module_names - {"cpsr", ""}
    return {canonicalize_name(brought.get(module, [module])[0]) for module in foreign}


@cache
def product() -> set[str]:
    others = ("benchmarks", "docs")  # docs links to the pages, of which the wheel has no Python
    rooms = [path.name for path in (ROOT / "cpsr").iterdir() if path.is_dir() and path.name not in others]
    return imported(*(f"cpsr/{name}" for name in rooms), "predictor", "fitter", "service")


def test_every_dependency_is_imported_by_the_product_or_the_first_program() -> None:
    program = re.findall(r"^(?:from|import) (\w+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    shown = {canonicalize_name(packages_distributions().get(name, [name])[0]) for name in program}
    assert required(PROJECT["dependencies"]) - product() - shown == set()


def test_every_import_is_of_a_dependency_or_of_an_extra() -> None:
    users = required(line for extra in ("plots", "transformers", "accelerate", "lightning") for line in EXTRAS[extra])
    assert product() - required(PROJECT["dependencies"]) - FASTAPI - users == set()


def test_benchmarks_import_what_their_extras_bring() -> None:
    brought = required([*PROJECT["dependencies"], *EXTRAS["bench"], *EXTRAS["dev"]])
    assert imported("benchmarks") - brought - FASTAPI - MOTO == set()


def test_every_extra_is_on_the_page() -> None:
    rows = re.findall(r"^\| (`[^|]+`) \|", (ROOT / "docs" / "versions.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert set(EXTRAS) - named == set()
