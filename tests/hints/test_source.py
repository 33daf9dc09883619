"""What cannot go on after a kill is refused when the function is decorated, by line and variable."""

import functools
import textwrap
from pathlib import Path

import pytest

from cpsr.errors import ConfigError, NotResumableError
from cpsr.hints import hint, resumable
from cpsr.hints.source import read_source
from tests.hints.programs import HEAD, Program, module_of

FIRST = HEAD.count("\n") + 1  # line of the text's first one

# The program, its line that is named (its first one is 1), and words of the message.
REFUSED = {
    "generator": ("def f():\n    hint()\n    yield 1", 1, "generator"),
    "coroutine": ("async def f():\n    hint()", 1, "asynchronous"),
    "no hint": ("def f():\n    return 1", 1, "has no `hint()`"),
    "assigned global": ("N = 0\ndef f():\n    global N\n    N = 1\n    hint()", 3, "the global 'N'"),
    "item of a global": ("N = {}\ndef f():\n    hint()\n    N[1] = 2", 4, "the global 'N'"),
    "part of a global": ("N = {}\ndef f():\n    hint()\n    N[1].x.y += 2", 4, "the global 'N'"),
    "list that is global": ("N = []\ndef f():\n    hint()\n    N.append(1)", 4, "the global 'N'"),
    "variables unseen": ("def f():\n    hint()\n    return locals()", 3, "locals()"),
    "hint as value": ("def f():\n    x = hint()\n    return x", 1, "has no `hint()`"),
    "hint in an expression": ("def f():\n    hint()\n    return [hint() for _ in range(2)]", 3, "no statement"),
    "hint passed on": ("def f(g):\n    hint()\n    g(hint)", 3, "no statement"),
    "hint in a function inside": ("def f():\n    hint()\n    def g():\n        hint()\n    return 1", 3, "FunctionDef"),
    "hint in match": ("def f(x):\n    match x:\n        case 1:\n            hint()", 2, "Match"),
    "hint in a handler": ("def f():\n    try:\n        pass\n    except ValueError:\n        hint()", 5, "exception"),
    "hint in finally": ("def f():\n    try:\n        pass\n    finally:\n        hint()", 5, "exception"),
    "kept variable": ("def f(n):\n    g = lambda: n\n    hint()\n    return 1", 2, "variable 'n'"),
    "kept in a comprehension": ("def f(n):\n    hint()\n    return [lambda: n for _ in 'ab']", 3, "variable 'n'"),
    "open file around": ("def f(p):\n    with open(p) as file:\n        hint()", 2, "open 'file' again"),
    "open file": ("def f(p):\n    file = open(p)\n    hint()\n    return file.read()", 2, "'file' holds an open file"),
    "path's open file": (
        "def f(p):\n    file = p.open()\n    hint()\n    file.close()",
        2,
        "'file' holds an open file",
    ),
    "unknown manager": ("def f(lock):\n    with lock:\n        hint()", 2, "open 'lock' again"),
    "manager of a variable": ("def f(x):\n    with torch.set_grad_enabled(x):\n        hint()", 2, "again"),
    "generator expression": ("def f(xs):\n    for x in (2 * x for x in xs):\n        hint()", 2, "in the middle"),
    "map": ("def f(xs):\n    for x in map(str, xs):\n        hint()", 2, "in the middle of 'map(str, xs)'"),
    "lines of a file": ("def f(p):\n    for x in open(p):\n        hint()", 2, "in the middle"),
    "lambda": ("def f(x):\n    g = lambda y: y\n    hint()\n    return g(x)", 2, "'g' holds a lambda"),
    "function inside": ("def f(x):\n    def g(y): return y\n    hint()\n    return g(x)", 2, "'g' holds a function"),
    "module": ("def f(x):\n    import math as m\n    hint()\n    return m.pi", 2, "'m' holds a module"),
    "live generator": (
        "def f(x):\n    g = (y for y in 'ab')\n    hint()\n    return list(g)",
        2,
        "'g' holds a generator",
    ),
    "set": ("def f(x):\n    g = {x}\n    hint()\n    return g", 2, "'g' holds a set"),
    "default type": ("def f():\n    torch.set_default_dtype(torch.float64)\n    hint()", 2, "torch.set_default_dtype"),
    "gradients off": ("def f():\n    torch.set_grad_enabled(False)\n    hint()", 2, "call it before the function"),
    "NumPy's errors": ("def f():\n    old = numpy.seterr(all='raise')\n    hint()", 2, "numpy.seterr sets what"),
    "own names": ("def f(_cpsr_1):\n    hint()", 1, "'_cpsr_1' begins with"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_it_is_refused_by_line_and_variable(tmp_path: Path, kind: str) -> None:
    text, line, words = REFUSED[kind]
    module = module_of(tmp_path, text)
    with pytest.raises(NotResumableError, match=r"cannot be resumable") as caught:
        Program(module.f)
    assert words in str(caught.value)
    assert f"{module.__file__}:{FIRST + line - 1}:" in str(caught.value)


def test_variables_of_the_function_around(tmp_path: Path) -> None:
    module = module_of(tmp_path, "def g(n):\n    def f():\n        hint()\n        return n\n    return f")
    with pytest.raises(NotResumableError, match="'n' is of the function around it"):
        read_source(module.g(1))


def test_what_is_not_needed_after_a_hint_may_be_anything(tmp_path: Path) -> None:
    text = """
    def f(xs):
        import math as m
        key = lambda x: -x
        found = {m.floor(x) for x in sorted(xs, key=key)}
        total = sum(found)
        hint()
        with contextlib.nullcontext(), torch.no_grad():
            hint()
        return total + sum(x for x in xs)
    """
    module = module_of(tmp_path, textwrap.dedent(text))
    assert Program(module.f).interrupted(lambda: {"xs": [1.5, 2.5]}) == 2


@pytest.mark.parametrize("name", ["self.__n", "__n"])
def test_private_names_of_a_class_are_refused(tmp_path: Path, name: str) -> None:
    module = module_of(tmp_path, f"class A:\n    def f(self):\n        hint()\n        return {name}")
    with pytest.raises(NotResumableError, match="'__n' is a private name of a class"):
        read_source(module.A.f)


def test_a_setting_as_a_manager_is_fine(tmp_path: Path) -> None:
    text = "def f():\n    with torch.set_grad_enabled(False):\n        hint()\n    return torch.is_grad_enabled()"
    assert Program(module_of(tmp_path, text).f).interrupted(dict) == 1


def test_a_file_that_was_edited_since_is_refused(tmp_path: Path) -> None:
    module = module_of(tmp_path, "def f():\n    hint()\n    return 1\n")
    path = Path(module.__file__ or "")
    path.write_text(path.read_text().replace("return 1", "return 22"))
    with pytest.raises(NotResumableError, match="other code than runs"):
        read_source(module.f)


def test_no_function_is_refused() -> None:
    with pytest.raises(NotResumableError, match="takes a function, not a partial"):
        read_source(functools.partial(print))


@pytest.mark.parametrize("allowance", [0.0, -1.0, float("nan")])
def test_an_allowance_is_positive(tmp_path: Path, allowance: float) -> None:
    with pytest.raises(ConfigError, match="allowance is"):
        resumable(tmp_path, allowance)


def test_a_hint_alone_does_nothing() -> None:
    hint()


def test_a_method_in_a_block_with_long_strings(tmp_path: Path) -> None:
    """The source is read in its place, so that indents in strings stay."""
    text = '''
    if True:
        def f(n):
            text = """a
    b"""
            for i in range(n):
                hint()
            return text
    '''
    module = module_of(tmp_path, textwrap.dedent(text))
    assert Program(module.f).interrupted(lambda: {"n": 2}) == 2
