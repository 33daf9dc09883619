"""What a helper sets for the whole process is noticed at the next hint."""

import decimal
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch

from cpsr.errors import NotResumableError
from tests.hints.programs import InMemory, Program, module_of

SETTERS = {
    "torch.set_default_dtype": ("torch.set_default_dtype(torch.float64)", "torch.set_default_dtype(torch.float32)"),
    "torch.set_default_device": ("torch.set_default_device('meta')", "torch.set_default_device(None)"),
    "torch.set_num_threads": ("torch.set_num_threads(3)", "torch.set_num_threads(1)"),
    "torch.use_deterministic_algorithms": (
        "torch.use_deterministic_algorithms(True)",
        "torch.use_deterministic_algorithms(False)",
    ),
    "torch.set_flush_denormal": ("torch.set_flush_denormal(True)", "torch.set_flush_denormal(False)"),
    "torch.set_printoptions": ("torch.set_printoptions(precision=2)", "torch.set_printoptions(profile='default')"),
    "torch.set_grad_enabled": ("torch.set_grad_enabled(False)", "torch.set_grad_enabled(True)"),
    "numpy.seterr": ("numpy.seterr(all='ignore')", "numpy.seterr(all='warn', under='ignore')"),
    "numpy.set_printoptions": ("numpy.set_printoptions(precision=2)", "numpy.set_printoptions(precision=8)"),
    "decimal.setcontext": ("decimal.getcontext().prec = 5", "decimal.getcontext().prec = 28"),
    "os.chdir": ("os.chdir('/')", "os.chdir(HERE)"),
    "sys.setrecursionlimit": ("sys.setrecursionlimit(5000)", "sys.setrecursionlimit(BEFORE)"),
    "warnings.simplefilter": ("warnings.simplefilter('error')", "warnings.filters.pop(0)"),
}
HEAD = "import decimal, os, sys, warnings\nHERE, BEFORE = os.getcwd(), sys.getrecursionlimit()\n"


@pytest.mark.parametrize("name", SETTERS)
def test_a_setting_that_a_helper_makes_is_refused(tmp_path: Path, name: str) -> None:
    text = (
        HEAD + "def g():\n    {}\ndef back():\n    {}\ndef f(n):\n    for i in range(n):\n        hint()\n        g()\n"
    )
    module = module_of(tmp_path, text.format(*SETTERS[name]))
    try:
        with pytest.raises(NotResumableError, match=rf"possible at this hint: the call has changed what {name} sets"):
            Program(module.f).call({"n": 3}, InMemory())
    finally:
        module.back()


@pytest.fixture
def errors_of_numpy() -> Iterator[None]:
    yield
    numpy.seterr(all="warn", under="ignore")
    torch.set_grad_enabled(True)


@pytest.mark.usefixtures("errors_of_numpy")
@pytest.mark.parametrize("place", ["before", "inside"])
def test_a_setting_is_noticed_where_a_with_covers_it(tmp_path: Path, place: str) -> None:
    text = """
    def g(wanted):
        if wanted == PLACE:
            torch.set_grad_enabled(PLACE == "inside")
    def f(n):
        for i in range(n):
            g("before")
            with torch.no_grad():
                with numpy.errstate(all="ignore"):
                    hint()
                    g("inside")
                    hint()
    """
    module = module_of(tmp_path, f"PLACE = {place!r}\n" + textwrap.dedent(text))
    words = (
        "no checkpoint is possible in this `with`" if place == "before" else "no checkpoint is possible at this hint"
    )
    with pytest.raises(
        NotResumableError,
        match=rf":{14 if place == 'before' else 18}: {words}: the call has changed what torch.set_grad_enabled sets",
    ):
        Program(module.f).call({"n": 3}, InMemory())


def test_settings_within_blocks_are_no_changes(tmp_path: Path) -> None:
    text = """
    def f(w):
        for i in range(2):
            with torch.no_grad(), numpy.errstate(all="ignore"):
                hint()
                w *= 2
                try:
                    with torch.enable_grad():
                        hint()
                        if i: break
                finally:
                    w += 1
            hint()
        hint()
        return w, torch.is_grad_enabled()
    """
    module = module_of(tmp_path, textwrap.dedent(text))
    assert Program(module.f).interrupted(lambda: {"w": torch.ones(2)}) == 6


def test_flags_of_decimals_are_no_setting(tmp_path: Path) -> None:
    module = module_of(
        tmp_path,
        "import decimal\ndef f():\n    hint()\n    x = str(decimal.Decimal(1) / 3)\n    hint()\n    return x\n",
    )
    decimal.getcontext().clear_flags()
    assert Program(module.f).interrupted(dict) == 2
