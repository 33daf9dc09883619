"""What is read after a hint, and nothing else."""

import textwrap
from pathlib import Path

import pytest

from cpsr.hints.liveness import live_variables
from cpsr.hints.source import read_source
from tests.hints.programs import module_of

# Statements around one hint, with arguments a and b, and what is live there.
CASES = {
    "not read again": ("x = a\nhint()\nx = b\nreturn x", {"b"}),
    "in a branch": ("x = a\nhint()\nif b:\n    x = 1\nreturn x", {"b", "x"}),
    "in both branches": ("x = a\nhint()\nif b:\n    x = 1\nelse:\n    x = 2\nreturn x", {"b"}),
    "in the next repetition": ("for i in a:\n    hint()\n    b += 1\n    c = b", {"_cpsr_1", "b"}),
    "of the loop around": ("for i in a:\n    for j in b:\n        hint()\n    c = i", {"_cpsr_1", "_cpsr_2", "b", "i"}),
    "test of a loop": ("x = 1\nwhile x < a:\n    hint()\n    x = b", {"a", "b"}),
    "after break": ("x = y = 1\nfor i in a:\n    hint()\n    if b: break\n    x = y = 2\nelse:\n    return y\nreturn x",
                    {"_cpsr_1", "b", "x"}),
    "in a handler": ("x = 1\ntry:\n    hint()\n    x = a\nexcept ValueError:\n    pass\nreturn x", {"a", "x"}),
    "in finally": ("x = 1\ntry:\n    hint()\n    return a\nfinally:\n    print(x)", {"a", "x"}),
    "after a swallowed error": (
        "x = 1\nwith contextlib.suppress(ValueError):\n    hint()\n    x = int(a)\nreturn x", {"a", "x"}),
    "in place": ("x = [1]\nhint()\nx[a] = 2\nx.y = b", {"a", "b", "x"}),
    "added to": ("x = a\nhint()\nx += 1", {"x"}),
    "in a comprehension": ("hint()\nreturn [a + z for z in b]", {"a", "b"}),
    "in a default": ("hint()\ng = lambda x, y=a: x\nreturn g(b)", {"a", "b"}),
    "deleted": ("x = a\nhint()\ndel x", {"x"}),
    "annotated": ("x: int = a\nhint()\nx: int = b\nreturn x", {"b"}),
    "unpacked": ("x = y = a\nhint()\nx, *y = b\nreturn x, y", {"b"}),
    "raised": ("x = a\nhint()\nif b: raise ValueError(x)", {"b", "x"}),
    "walrus": ("x = a\nhint()\nif b and (x := 2): pass\nreturn x", {"b", "x"}),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_what_is_live(tmp_path: Path, kind: str) -> None:
    body, live = CASES[kind]
    module = module_of(tmp_path, f"def f(a, b):\n{textwrap.indent(body, '    ')}\n")
    assert live_variables(read_source(module.f)).at == {1: live}
