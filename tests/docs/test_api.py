"""Public names are what `__all__` lists and the site shows, and pages use no others."""

import ast
import inspect
import re
import textwrap
from importlib import import_module
from pathlib import Path

import pytest

from cpsr import CPSRRecovery, TorchAdapter
from docs.site.api import MODULES, internal, text

ROOT = Path(__file__).parents[2]
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))


def programs() -> dict[str, str]:
    """Python that users read, by its place."""
    found = {
        f"{page.relative_to(ROOT)}:{number}": textwrap.dedent(program)
        for page in PAGES
        for number, program in enumerate(PYTHON.findall(page.read_text(encoding="utf-8")))
    }
    return found | {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in EXAMPLES}


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_a_docstring(module: str) -> None:
    public = import_module(module)
    bare = [name for name in public.__all__ if not inspect.getdoc(getattr(public, name))]
    assert bare == []
    assert f".. automodule:: {module}\n" in text()


def test_pages_and_examples_import_public_names_alone() -> None:
    wrong, count = [], 0
    for place, program in programs().items():
        for node in ast.walk(ast.parse(program)):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("cpsr"):
                continue
            count += 1
            known = import_module(node.module or "").__all__ if node.module in MODULES else ()
            wrong += [f"{place}: {node.module}.{alias.name}" for alias in node.names if alias.name not in known]
    assert wrong == [], (
        "a module that users import from is listed in docs/site/api.py, and what they import in its __all__"
    )
    assert count >= 12


def test_what_cpsr_alone_calls_of_an_adapter_is_not_shown() -> None:
    assert internal("shard", TorchAdapter.shard)
    assert internal("iteration", TorchAdapter.iteration)
    assert not internal("iteration", CPSRRecovery.iteration)
