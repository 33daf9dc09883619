"""Programs that are interrupted at every hint end as those that are not."""

import textwrap
from pathlib import Path

import pytest
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
    "a += next(it, 1)",
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
        ["range(3)", "[1, 2, 2]", "list(xs[:3])", "enumerate(xs[-2:], b)", "zip(range(2), 'ab')", "d.items()", "ys[:2]"]
    )
    bodies = st.tuples(inner, ends, inner).map(lambda parts: [*parts[0], *filter(None, [parts[1]]), *parts[2]])
    nothing: list[str] = []
    other = st.one_of(st.just(nothing), inner)

    def for_loop(parts: tuple[str, list[str], list[str]]) -> str:
        target = "i, j" if any(word in parts[0] for word in ("enumerate", "zip", "items")) else "i"
        ended = f"\nelse:\n{block(parts[2])}" if parts[2] else ""
        return f"for {target} in {parts[0]}:\n{block(['xs.append(i)', *parts[1]])}{ended}"

    def while_loop(parts: tuple[int, list[str], list[str]]) -> str:
        ended = f"\nelse:\n{block(parts[2])}" if parts[2] else ""
        return f"n{parts[0]} = 0\nwhile n{parts[0]} < 3:\n{block([f'n{parts[0]} += 1', *parts[1]])}{ended}"

    return st.one_of(
        st.tuples(over, bodies, other).map(for_loop),
        st.tuples(name, bodies, other).map(while_loop),
        st.tuples(inner, inner).map(lambda both: f"if a % 2:\n{block(both[0])}\nelse:\n{block(both[1])}"),
        st.tuples(inner, inner).map(
            lambda both: (
                f"try:\n{block(both[0])}\nfinally:\n{block(['b += 1', *(one for one in both[1] if HINT not in one)])}"
            )
        ),
        st.tuples(inner, inner).map(
            lambda both: f"try:\n{block(both[0])}\nexcept ValueError:\n    c += len(xs)\nelse:\n{block(both[1])}"
        ),
        inner.map(lambda body: f"with contextlib.suppress(ValueError):\n{block(body)}"),
    )


STATEMENT = st.recursive(
    st.one_of(st.just(HINT), st.sampled_from(SIMPLE)),
    lambda inner: loops(st.lists(inner, min_size=1, max_size=4)),
    max_leaves=14,
)
PROGRAM = st.lists(STATEMENT, min_size=1, max_size=6).filter(lambda found: any(HINT in one for one in found))
BEGIN = ["b, c = 1, 2", "ys = xs", "d = {0: xs, 1: []}", "z = 0", "it = iter(range(4))"]


# A failing program is printed as it is: to shorten one with a hundred checkpoints takes minutes.
@settings(
    max_examples=80,
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


def test_a_list_that_grows_while_it_is_gone_over(tmp_path: Path) -> None:
    text = """
    def f(xs):
        for x in xs:
            if x > 2:
                xs.append(x - 1)
            hint()
        return xs
    """
    assert run(tmp_path, text, xs="[5, 4]") == 7


@pytest.mark.parametrize("over", ["xs", "reversed(xs)", "enumerate(xs)", "zip(xs, reversed(xs))", "zip(xs, range(9))"])
@pytest.mark.parametrize("change", ["xs.clear()", "xs *= 0; xs += [7]", "del xs[1:]", "del xs[:2]", "xs.pop()"])
def test_a_list_that_is_emptied_and_filled_again_while_it_is_gone_over(tmp_path: Path, over: str, change: str) -> None:
    text = f"""
    def f(xs):
        out = []
        for x in {over}:
            out.append(x)
            hint()
            if len(out) == 3:
                {change}
                hint()
                xs += [len(out), 8, 9, 10, 11, 12, 13]
                hint()
                xs.pop(0)
                hint()
        return out, xs
    """
    assert run(tmp_path, text, xs="[1, 2, 3, 4, 5]") >= 6


def test_a_mapping_whose_values_change_while_it_is_gone_over(tmp_path: Path) -> None:
    text = """
    def f(d):
        out = []
        for k, v in d.items():
            d["c"] += 10
            hint()
            out.append((k, v))
        return out
    """
    assert run(tmp_path, text, d="{'a': 1, 'b': 2, 'c': 3}") == 3


@pytest.mark.parametrize("kind", ["dict", "OrderedDict"])
@pytest.mark.parametrize("over", ["d", "d.values()", "enumerate(d.items())", "zip(d, range(9))"])
def test_a_mapping_that_grows_while_it_is_gone_over_ends_the_loop_as_python_does(
    tmp_path: Path, kind: str, over: str
) -> None:
    """With an error; for an `OrderedDict` whose last item was taken, without one."""
    text = f"""
    from collections import OrderedDict
    def f(d, last):
        d, out = {kind}(d), []
        for one in {over}:
            out.append(one)
            hint()
            if len(out) == last:
                d["new"] = 1
                hint()
        return out, d
    """
    for last in (1, 3):
        run(tmp_path, text, d="{'a': 1, 'b': 2, 'c': 3}", last=str(last))


def test_a_mapping_that_grows_before_the_loop_is_left(tmp_path: Path) -> None:
    text = """
    def f(d):
        for key in d:
            d[key * 2] = 1
            hint()
            break
        return d
    """
    assert run(tmp_path, text, d="{'a': 1, 'b': 2}") == 1


def test_a_mapping_that_has_its_length_again_is_not_gone_over_otherwise(tmp_path: Path) -> None:
    text = """
    def f(d):
        out = []
        for key in d:
            out.append(key)
            d["new"] = 1
            hint()
            del d["new"]
        return out
    """
    with pytest.raises(NotResumableError, match=r"has as many items again as before.*list\("):
        run(tmp_path, text, d="{'a': 1, 'b': 2}")


@pytest.mark.parametrize("removed", ["a", "b"])
def test_a_mapping_with_other_keys_is_refused_where_python_may_miss_some(tmp_path: Path, removed: str) -> None:
    text = f"""
    def f(d):
        out = []
        for key in d:
            out.append(key)
            if key == "b":
                del d["{removed}"]
                d["new"] = 1
            hint()
        return out
    """
    with pytest.raises(NotResumableError, match=r"line 9 .*lost keys that the loop has taken.*list\("):
        run(tmp_path, text, d="{'a': 1, 'b': 2, 'c': 3, 'd': 4}")


def test_a_key_that_is_still_to_come_may_become_another(tmp_path: Path) -> None:
    text = """
    def f(d):
        out = []
        for key in d:
            out.append(key)
            if key == "b":
                del d["c"]
                d["new"] = 1
            hint()
        return out
    """
    assert run(tmp_path, text, d="{'a': 1, 'b': 2, 'c': 3, 'd': 4}") == 4


def test_a_tensor_that_is_given_other_memory_while_it_is_gone_over(tmp_path: Path) -> None:
    """Python goes on over the rows of before."""
    text = """
    def f(n):
        w, out = torch.arange(n), []
        for row in w:
            out.append(int(row))
            if early: w.data = w.data * 10
            hint()
            w.data = w.data * 10
        return out
    """
    with pytest.raises(NotResumableError, match=r"other memory.*list\("):
        run(tmp_path, text.replace("early", "True"), n="3")
    with pytest.raises(NotResumableError, match=r"other memory.*list\("):
        run(tmp_path, text.replace("early", "False"), n="3")


def test_a_finally_runs_once_where_the_call_goes_on_in_its_try(tmp_path: Path) -> None:
    text = """
    def f(log):
        for i in range(3):
            try:
                hint()
                if i == 1:
                    continue
                log.append(i)
            finally:
                log.append("end")
        return log
    """
    assert run(tmp_path, text, log="[]") == 3


def test_a_handler_sees_the_variables_of_before(tmp_path: Path) -> None:
    """`x` is read in the handler alone, and assigned before a hint in the `try`."""
    text = """
    def f(n):
        x = 1
        try:
            hint()
            y = 1 // n
            x = 2
            hint()
            return y, x
        except ZeroDivisionError:
            return x
    """
    assert run(tmp_path, text, n=0) == 1
    assert run(tmp_path, text, n=1) == 2


def test_a_hint_in_the_else_of_loops(tmp_path: Path) -> None:
    text = """
    def f(n):
        out = []
        for i in range(n):
            out.append(i)
        else:
            hint()
            out.append("for")
        while n:
            n -= 1
        else:
            hint()
            out.append("while")
        return out, n
    """
    assert run(tmp_path, text, n=3) == 2


def test_gradients_are_off_again_inside_their_block(tmp_path: Path) -> None:
    text = """
    def f(w):
        w.requires_grad_()
        with torch.no_grad():
            for i in range(3):
                w *= 2
                hint()
                w += 1
        return w, torch.is_grad_enabled()
    """
    assert run(tmp_path, text, w="torch.ones(2)") == 3


def test_variables_of_comprehensions_are_saved_whole(tmp_path: Path) -> None:
    text = """
    def f(xs):
        factor = 3
        for i in range(3):
            hint()
            factor += i
            xs = [x * factor + sum(y for y in xs if y < factor) for x in xs]
        return xs
    """
    assert run(tmp_path, text, xs="[1, 2]") == 3


@pytest.mark.parametrize("deleted", ["n", "m"])
def test_a_deleted_variable_is_not_back(tmp_path: Path, deleted: str) -> None:
    text = f"""
    def f(n):
        m = 1
        for i in range(2):
            del {deleted}
            hint()
            {deleted} = i
        try:
            del {deleted}
            hint()
            return {deleted}
        except UnboundLocalError:
            return "unbound"
    """
    assert run(tmp_path, text, n=3) == 3


def test_arguments_of_every_kind(tmp_path: Path) -> None:
    module = module_of(
        tmp_path,
        textwrap.dedent("""
        def f(a, /, b=2, *more, c, **named):
            for i in range(3):
                a, b, more, named["i"] = a + 1, b * 2, (*more, i), c
                hint()
            return a, b, more, named
        """),
    )
    program = Program(module.f)
    assert program.written.__kwdefaults__ is None
    assert program.plain(1, 2, 3, c=4, e=5) == (4, 16, (3, 0, 1, 2), {"e": 5, "i": 4})


@pytest.mark.parametrize("left", ["break", "return out, 1", "raise ValueError"])
def test_a_loop_that_is_left_behind_its_hint(tmp_path: Path, left: str) -> None:
    """Its iterator gives nothing more, and the loop is entered with it all the same."""
    text = f"""
    def f(n):
        out = []
        for i in range(n):
            for j in range(n):
                out.append((i, j))
                hint()
                {left}
        return out
    """
    assert run(tmp_path, text, n=2) == (2 if left == "break" else 1)


def test_a_kill_runs_no_finally(tmp_path: Path) -> None:
    text = """
    def f(out):
        for i in range(3):
            try:
                hint()
                out.append(i)
            finally:
                if i == 1: return out, "left"
        return out
    """
    assert run(tmp_path, text, out="[]") == 2


def test_values_stay_the_very_objects_that_they_are(tmp_path: Path) -> None:
    """Those of the program, of its module and of its arguments; `in` asks for them first."""
    text = """
    MISSING, PAIR, TABLE = float("nan"), (1, ["x"]), [[1], [2]]
    def pair():
        return "a pair", 2.5
    def f(rows, key):
        seen, mine, again = [MISSING, math.nan, rows[0], float("nan")], PAIR, pair()
        last, text, row = seen[-1], "some text", TABLE[1]
        for i in range(2):
            hint()
            rows.append(row)
        flags = [MISSING in seen, math.nan in seen, rows[0] in seen, last in seen, mine is PAIR, again is pair()]
        return flags, text is "some text", row is TABLE[1], mine[1] is PAIR[1], key is rows[1], again[0] is pair()[0]
    """
    module = module_of(tmp_path, textwrap.dedent(text))

    def given() -> dict[str, object]:
        key = ("k", float("nan"))
        return {"rows": [float("nan"), key], "key": key}

    assert Program(module.f).interrupted(given) == 2
    assert module.f(**given()) == ([True] * 6, *[True] * 5)


def test_global_random_generators_by_another_name(tmp_path: Path) -> None:
    """Drawn from as an argument, as a variable, and by the functions of their modules."""
    text = """
    from random import random as draw
    def f(own, functions):
        mine, his, out = torch.default_generator, random._inst, []
        arrays = numpy.random.mtrand._rand
        for i in range(3):
            out += [float(torch.rand(1, generator=mine)), his.random(), float(arrays.rand()), draw()]
            hint()
            out += [float(torch.rand(1)), random.random(), float(numpy.random.rand()), own[0].random()]
            out += [float(one()) for one in functions]
        return out, own[0] is his
    """
    assert run(tmp_path, text, own="[random._inst]", functions="[random.random, numpy.random.rand]") == 3
