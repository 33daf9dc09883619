"""Programs that are interrupted at every hint end as those that are not, or are refused by name."""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from cpsr.errors import NotResumableError
from tests.hints.programs import Program, module_of

SIMPLE = [
    "a = a * 3 + len(xs) % 7",
    "b, c = c + 1, b",
    "xs.append(a % 11)",
    "ys = xs",
    "ys = list(xs)",
    "xs = [x + b for x in ys if x != c]",
    "c += random.randrange(5)",
    "a = int(torch.randint(100, (1,)))",
    "d[b % 3] = xs",
    "xs += [len(d)]",
    "del ys\nys = [a]",
    "z = a",
    "xs.append(z)",
    "c += sum(x for x in xs if x > b)",
    "try:\n    z = xs[b]\nexcept IndexError:\n    c += 1\nfinally:\n    b += 1",
    "with torch.no_grad():\n    a += 1\n    ys = [a]",
    "if a % 5 == 3: raise ValueError(a)",
]
HINT = "hint()"


def block(statements: list[str]) -> str:
    return textwrap.indent("\n".join(statements), "    ")


def loops(inner: st.SearchStrategy[list[str]]) -> st.SearchStrategy[str]:
    """Compound statements around others."""
    ends = st.sampled_from(
        ["", "", "break", "if a % 3 == 0: break", "if b % 2: continue", "if len(xs) > 9: return a, xs, d"]
    )
    name = st.integers(0, 99)
    over = st.sampled_from(
        [
            *("range(3)", "[1, 2, 2]", "xs[:3]", "list(enumerate(xs[-2:], b))", "tuple(zip(range(2), 'ab'))"),
            *("ys[:2]", "xs", "ys", "list(d)", "list(d.items())", "tuple(d.values())"),
        ]
    )
    bodies = st.tuples(inner, ends, inner).map(lambda parts: [*parts[0], *filter(None, [parts[1]]), *parts[2]])
    nothing: list[str] = []
    other = st.one_of(st.just(nothing), inner.map(lambda found: [one for one in found if HINT not in one]))

    def for_loop(parts: tuple[str, list[str], list[str]]) -> str:
        target = "i, j" if any(word in parts[0] for word in ("enumerate", "zip", "items")) else "i"
        ended = f"\nelse:\n{block(parts[2])}" if parts[2] else ""
        body = ["if len(xs) > 20: break", "xs.append(i if isinstance(i, int) else 0)", *parts[1]]
        return f"for {target} in {parts[0]}:\n{block(body)}{ended}"

    def while_loop(parts: tuple[int, list[str], list[str]]) -> str:
        ended = f"\nelse:\n{block(parts[2])}" if parts[2] else ""
        return f"n{parts[0]} = 0\nwhile n{parts[0]} < 3:\n{block([f'n{parts[0]} += 1', *parts[1]])}{ended}"

    return st.one_of(
        st.tuples(over, bodies, other).map(for_loop),
        st.tuples(name, bodies, other).map(while_loop),
        st.tuples(inner, inner).map(lambda both: f"if a % 2:\n{block(both[0])}\nelse:\n{block(both[1])}"),
    )


STATEMENT = st.recursive(
    st.one_of(st.just(HINT), st.sampled_from(SIMPLE)),
    lambda inner: loops(st.lists(inner, min_size=1, max_size=4)),
    max_leaves=14,
)
PROGRAM = st.lists(STATEMENT, min_size=1, max_size=6).filter(lambda found: any(HINT in one for one in found))
BEGIN = ["b, c = 1, 2", "ys = xs", "d = {0: xs, 1: []}", "z = 0"]


# A failing program is printed as it is: to shorten one with a hundred checkpoints takes minutes.
@settings(
    max_examples=30,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(PROGRAM)
def test_generated_programs_end_alike_wherever_they_are_interrupted(
    tmp_path_factory: pytest.TempPathFactory, statements: list[str]
) -> None:
    body = block([*BEGIN, *statements, "return a, b, c, xs, ys, d, xs is ys"])
    note(f"def program(a, xs):\n{body}")
    module = module_of(tmp_path_factory.mktemp("program"), f"def program(a, xs):\n{body}\n")
    Program(module.program).interrupted(lambda: {"a": 4, "xs": [5, 6]})


def run(tmp_path: Path, text: str, **given: object) -> int:
    """How many checkpoints a program was interrupted at."""
    module = module_of(tmp_path, textwrap.dedent(text))
    return Program(module.f).interrupted(lambda: {key: eval(str(one), vars(module)) for key, one in given.items()})


def test_a_loop_goes_on_with_its_next_item(tmp_path: Path) -> None:
    text = """
    def f(n):
        seen = []
        for i in range(n):
            for j in range(5):
                seen.append((i, j, random.random()))
                hint()
            hint()
        return seen
    """
    assert run(tmp_path, text, n=3) == 18


@pytest.mark.parametrize("change", ["xs.clear()", "xs.append(9)", "del xs[1:]"])
def test_a_list_that_is_changed_while_it_is_gone_over(tmp_path: Path, change: str) -> None:
    text = f"""
    def f(xs):
        out = []
        for x in xs:
            out.append(x)
            hint()
            if len(out) == 2:
                {change}
        return out, xs
    """
    assert run(tmp_path, text, xs="[1, 2, 3, 4]") >= 2


def test_a_training_with_its_objects_as_arguments(tmp_path: Path) -> None:
    text = """
    def f(model, optimizer, schedule, generator, data):
        model.train()
        best = None
        for epoch in range(2):
            for batch in data:
                noise = torch.randn(batch.shape, generator=generator)
                loss = model(batch + noise).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
                best = loss.detach() if best is None else torch.minimum(best, loss.detach())
                del loss
                hint()
            schedule.step()
        model.eval()
        return best
    """
    module = module_of(tmp_path, textwrap.dedent(text))
    torch = module.torch

    def given() -> dict[str, object]:
        torch.manual_seed(5)
        layers = [torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)]
        model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        data = [torch.randn(5, 3) for _ in range(2)]
        generator = torch.Generator().manual_seed(8)
        return {
            "model": model,
            "optimizer": optimizer,
            "schedule": schedule,
            "generator": generator,
            "data": data,
        }

    assert Program(module.f).interrupted(given) == 4


def test_parts_of_arguments_stay_themselves_wherever_the_call_moves_them(tmp_path: Path) -> None:
    text = """
    def f(rows, table):
        first, inner = rows[0], table["a"]
        taken = rows.pop()
        for i in range(3):
            random.shuffle(rows)
            rows.insert(0, [i])
            table["b"], table["a"] = table["a"], [rows[0]]
            first.append(i)
            inner[0].append(i)
            taken.append(first)
            hint()
        same = [first is one for one in rows], inner is table["b"]
        return rows, table, taken, inner, same
    """
    assert run(tmp_path, text, rows="[[1], [2], [3], [4]]", table="{'a': [[7]], 'b': []}") == 3


def test_tensors_and_arrays_come_back_with_their_gradients(tmp_path: Path) -> None:
    text = """
    def f(rows, table):
        none = torch.empty(0, 3)
        weights = [torch.ones(2, requires_grad=True)] * 2
        halves = numpy.array_split(numpy.arange(7), 2)
        empty = numpy.zeros((0, 2), numpy.int16)
        seen = []
        for half in halves:
            weights[0].sum().backward()
            half[0] = 9
            rows[0] += 1
            table[1] = len(seen)
            hint()
            seen.append((len(none), str(empty.dtype)))
        return seen, halves, rows, table, weights, weights[0] is weights[1], weights[0].grad
    """
    assert run(tmp_path, text, rows="torch.zeros(2, 2)", table="numpy.zeros(3)") == 2


def test_a_loop_over_a_module_is_refused_which_would_begin_anew(tmp_path: Path) -> None:
    module = module_of(tmp_path, "def f(model):\n    for layer in model:\n        hint()\n")
    with pytest.raises(NotResumableError, match="over a Sequential"):
        Program(module.f).interrupted(lambda: {"model": torch.nn.Sequential(torch.nn.Linear(1, 1))})


REFUSED = {
    "with": "with torch.no_grad():\n    hint()",
    "try": "try:\n    hint()\nfinally:\n    pass",
    "else` of a loop": "for i in range(2):\n    pass\nelse:\n    hint()",
    "no statement of its own": "x = hint()\nhint()",
    "eval": "x = eval('1')\nhint()",
    "global": "global y\ny = 1\nhint()",
    "generator": "for x in (i for i in range(3)):\n    hint()",
    "over a map": "for x in map(str, xs):\n    hint()",
    "over a dict": "for x in {1: 2}:\n    hint()",
    "is a set": "x = {1}\nhint()\nprint(x)",
    "is a function": "x = lambda: 1\nhint()\nx()",
    "graph of a backward": "x = torch.ones(2, requires_grad=True) * 2\nhint()\nprint(x)",
    "array of object": "x = numpy.array([[], 1], object)\nhint()\nprint(x)",
    "in the order of its elements": "x = torch.ones(4)[::2]\nhint()\nprint(x)",
    "lie in memory": "x = numpy.arange(4)[::-1]\nhint()\nprint(x)",
    "shares memory with": "x = torch.ones(4)\ny = x.view(2, 2)\nhint()\nprint(x, y)",
    "is a Linear": "x = torch.nn.Linear(2, 2)\nhint()\nprint(x)",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_go_on_is_refused_by_line_and_name(tmp_path: Path, words: str) -> None:
    module = module_of(tmp_path, f"def f(xs):\n{block(REFUSED[words].splitlines())}\n")
    with pytest.raises(NotResumableError, match=words) as refused:
        Program(module.f).interrupted(lambda: {"xs": [1]})
    assert str(module.__file__) in str(refused.value)


# What a checkpoint would part from its owner, or the owner's would not come back.
PARTED = {
    "kept by the argument 'optimizer'": "group = optimizer.param_groups[0]\nhint()\ngroup['lr'] = 1",
    "the loop in line": "for group in optimizer.param_groups:\n    group['lr'] = 1\n    hint()",
    "variable 'grad' shares memory with the gradient of": "grad = x.grad\nhint()\ngrad.zero_()",
    "been given another type or shape": "x.data = torch.ones(4)\nhint()",
    "in place": "array.shape = (2, 2)\nhint()",
    "'log' is kept by the argument 'model'": "log = model.log\nhint()\nlog.append(1)",
    "'weight' is kept by": "weight = model.weight\nhint()\nweight.zero_()",
    "'row' shares memory with": "row = model.weight.data[0]\nhint()\nrow.zero_()",
    "'same' is kept by": "same = [model]\nsame.append(next(model.children()))\nhint()\nprint(same)",
    "shares memory with the variable": "whole = numpy.arange(4.0)\ntail = torch.from_numpy(whole[1:])\nhint()\n"
    "print(whole, tail)",
}


@pytest.fixture
def owners(tmp_path: Path) -> Callable[[str], Any]:
    def make(text: str) -> Any:
        module = module_of(tmp_path, f"def f(model, optimizer, x, array):\n{block(text.splitlines())}\n")

        def given() -> dict[str, object]:
            torch = module.torch
            model, x = torch.nn.Linear(1, 1), torch.ones(2, requires_grad=True)
            model.inner, model.bias.grad = torch.nn.Linear(1, 1), torch.ones(1)
            model.seen, model.log, x.grad = torch.zeros(2), [], torch.ones(2)
            optimizer = torch.optim.SGD([*model.parameters(), x], lr=0.1)
            return {"model": model, "optimizer": optimizer, "x": x, "array": module.numpy.arange(4.0)}

        return Program(module.f), given

    return make


@pytest.mark.parametrize("words", PARTED)
def test_what_would_be_parted_from_its_owner_is_refused(owners: Any, words: str) -> None:
    program, given = owners(PARTED[words])
    with pytest.raises(NotResumableError, match=words):
        program.interrupted(given)


def test_a_tensor_that_the_call_has_frozen_stays_frozen(owners: Any) -> None:
    program, given = owners("x.requires_grad_(False)\nhint()\nassert not x.requires_grad")
    assert program.interrupted(given) == 1


def test_tensors_that_an_optimizer_changes_are_arguments_too(tmp_path: Path) -> None:
    module = module_of(tmp_path, "def f(optimizer):\n    optimizer.step()\n    hint()\n")
    with pytest.raises(NotResumableError, match="changes a Parameter that is no argument"):
        Program(module.f).interrupted(
            lambda: {"optimizer": module.torch.optim.SGD(module.torch.nn.Linear(1, 1).parameters(), lr=0.1)}
        )


@pytest.mark.parametrize("value", ["object()", "lambda: xs"])
def test_arguments_that_cannot_be_saved_are_refused_by_name(tmp_path: Path, value: str) -> None:
    module = module_of(tmp_path, "xs = []\ndef made():\n    xs = []\n    return " + value + "\ndef f(x):\n    hint()\n")
    with pytest.raises(NotResumableError, match="the argument 'x'"):
        Program(module.f).interrupted(lambda: {"x": module.made()})


def test_variables_of_a_function_around_it_are_refused(tmp_path: Path) -> None:
    text = "def outer(n):\n    def f():\n        hint()\n        return n\n    return f\n"
    with pytest.raises(NotResumableError, match="'n' is a variable of the function around it"):
        Program(module_of(tmp_path, text).outer(1))
