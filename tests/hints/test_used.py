"""What a function uses of its module: other code is noticed, and so are globals that a call changes."""

from pathlib import Path

import pytest
import torch

from cpsr.errors import NotResumableError
from cpsr.hints.used import Used
from tests.hints.programs import module_of

EDITED = {
    "tuple": ("N = (1, 2)\ndef f():\n    return N", "(1, 2)", "(1, 3)"),
    "mapping": ("N = {'a': [1]}\ndef f():\n    return N", "[1]", "[2]"),
    "table of functions": ("def g(): return 1\nN = {'a': g}\ndef f():\n    return N", "return 1", "return 2"),
    "attribute of a class": ("class A:\n    n = 1\ndef f():\n    return A.n", "n = 1", "n = 2"),
    "static method": (
        "class A:\n    @staticmethod\n    def g(): return 1\ndef f():\n    return A.g()",
        "return 1",
        "return 2",
    ),
    "property": (
        "class A:\n    @property\n    def g(_): return 1\ndef f(): return A()",
        "return 1",
        "return 2",
    ),
    "base class": ("class B:\n    n = 1\nclass A(B): pass\ndef f():\n    return A.n", "n = 1", "n = 2"),
    "cache": (
        "import functools\n@functools.cache\ndef g(): return 1\ndef f():\n    return g()",
        "return 1",
        "return 2",
    ),
    "decorated": (
        "import functools\ndef d(g):\n    @functools.wraps(g)\n    def h(): return g()\n    return h\n"
        "@d\ndef g(): return 1\ndef f():\n    return g()",
        "return 1",
        "return 2",
    ),
    "default": ("def g(x=1): return x\ndef f():\n    return g()", "x=1", "x=2"),
    "tensor": ("N = torch.ones(2)\ndef f():\n    return N", "ones", "zeros"),
    "array": ("N = numpy.ones(2)\ndef f():\n    return N", "ones", "zeros"),
    "enumeration": ("import enum\nclass A(enum.Enum):\n    X = 1\ndef f():\n    return A.X", "X = 1", "X = 2"),
    "data class": (
        "import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int = 1\nN = A()\ndef f():\n    return N",
        "int = 1",
        "int = 2",
    ),
    "partial": (
        "import functools\ndef g(x): return x\nN = functools.partial(g, 1)\ndef f():\n    return N()",
        "(g, 1)",
        "(g, 2)",
    ),
    "itself": ("N = [1]\nN.append(N)\ndef f():\n    return N", "[1]", "[2]"),
}


@pytest.mark.parametrize("kind", EDITED)
def test_an_edit_is_noticed(tmp_path: Path, kind: str) -> None:
    text, old, new = EDITED[kind]
    assert text.count(old) == 1
    first, same, other = (
        Used(module_of(tmp_path, one).f).texts for one in (text, f"# a comment\n{text}", text.replace(old, new))
    )
    assert first == same
    assert first != other


CHANGED = {
    "number": "N = 0\ndef g():\n    global N\n    N += 1",
    "new global": "def g():\n    global N\n    N = 1",
    "item": "N = {}\ndef g(): N[1] = 1",
    "heap": "import heapq\nN = []\ndef g(): heapq.heappush(N, 1)",
    "queue": "import collections\nN = collections.deque()\ndef g(): N.appendleft(1)",
    "bound method": "L = []\nN = L.append\ndef g(): N(1)",
    "tensor": "N = torch.zeros(1)\ndef g(): N.add_(1)",
    "array": "N = numpy.zeros(1)\ndef g(): numpy.add(N, 1, out=N)",
    "default": "def N(x=[]): x.append(1)\ndef g(): N()",
    "attribute of a class": "class N:\n    n = 0\ndef g(): N.n += 1",
    "object": "class A:\n    n = 0\nN = A()\ndef g(): N.n += 1",
    "variable of a decorator": (
        "def d(g):\n    n = []\n    def h(): n.append(1)\n    return h\n@d\ndef N(): pass\ndef g(): N()"
    ),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_a_global_that_a_helper_changes_is_refused(tmp_path: Path, kind: str) -> None:
    module = module_of(tmp_path, CHANGED[kind] + "\ndef f():\n    g()\n    return 1")
    used = Used(module.f)
    used.require_unchanged()
    module.f()
    with pytest.raises(NotResumableError, match="the call has changed the global 'N"):
        used.require_unchanged()


@pytest.mark.parametrize("kind", CHANGED)
def test_a_global_that_an_argument_changes_is_refused(tmp_path: Path, kind: str) -> None:
    """A function of another module."""
    module = module_of(tmp_path, CHANGED[kind] + "\nS = torch.Generator()\ndef f():\n    S\n    g()\n    return 1")
    used = Used(module_of(tmp_path, "def f(g): g()").f)
    used.watch([3, module.f, torch.nn.functional.cross_entropy])
    used.require_unchanged()
    module.f()
    with pytest.raises(NotResumableError, match="the call has changed the global 'N"):
        used.require_unchanged()


def test_a_global_that_is_replaced_by_an_equal_one_is_unchanged(tmp_path: Path) -> None:
    module = module_of(tmp_path, "N, M = [1.5], {'a': [2.5]}\ndef f():\n    return N, M")
    used = Used(module.f)
    vars(module)["N"], module.M["a"] = [float("1.5")], [float("2.5")]
    used.require_unchanged()
    module.M["a"].append(1)
    with pytest.raises(NotResumableError, match="the call has changed the global 'M"):
        used.require_unchanged()


def test_a_global_that_is_too_deep_is_refused(tmp_path: Path) -> None:
    module = module_of(tmp_path, "N = []\nfor _ in range(9999):\n    N = [N]\ndef f():\n    return N")
    with pytest.raises(NotResumableError, match="f uses a global with values too deep"):
        Used(module.f)


@pytest.mark.parametrize(
    "made_by",
    [
        *("itertools.count()", "(x for x in 'ab')", "(x for x in 'ab').__next__", "itertools.count().__next__"),
        *("random.Random(1).random", "[random.Random(1)]", "itertools.cycle('ab')", "io.StringIO()"),
    ],
)
def test_what_cannot_be_described_is_refused(tmp_path: Path, made_by: str) -> None:
    module = module_of(tmp_path, f"import io, itertools\nN = {made_by}\ndef g(): N\ndef f():\n    g()")
    with pytest.raises(NotResumableError, match="g uses the global 'N"):
        Used(module.f)


def test_what_is_of_other_modules_is_known_by_name(tmp_path: Path) -> None:
    text = "import functools, logging, pathlib, re\n"
    text += "L, P, R, T = logging.getLogger('x'), pathlib.Path('a'), re.compile('a'), "
    text += "list[int]\ndef f():\n    return L, P, R, T, torch.relu, math.sin, numpy.add, functools.reduce, f, hint"
    first, second = module_of(tmp_path, text), module_of(tmp_path, text)
    assert Used(first.f).texts == Used(second.f).texts
