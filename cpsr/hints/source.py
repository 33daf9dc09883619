"""The source of a function with hints: where it can go on after a kill, and which variables it still reads there.

Hints stand on lines of their own: in the function, in `for` and `while` loops, and in branches of `if`, however these
are nested. Everything else around a hint is refused by name. So are things that a checkpoint cannot see: variables of a
function around this one, assigned globals, and looks at all variables at once.
"""

import ast
import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import CodeType, FunctionType
from typing import Any

from cpsr.errors import NotResumableError

__all__ = ["FunctionSource", "hint", "read_source"]

_LOOK_INSIDE = ("locals", "vars", "globals", "eval", "exec", "dir")


def hint() -> None:
    """Mark a place where a checkpoint could be taken; does nothing outside a function that is `resumable`."""


@dataclass(frozen=True)
class FunctionSource:
    """A function whose hints are all at places where it can go on.

    Attributes:
        function: the function itself.
        tree: its definition without decorators, with the lines of its file.
        hints: the statements `hint()`, in the order of the program; the first one has number 1.
    """

    function: FunctionType
    tree: ast.FunctionDef
    hints: tuple[ast.stmt, ...]

    @cached_property
    def loops(self) -> tuple[ast.For, ...]:
        """The `for` loops with hints in them, in the order of the program; the first one has number 1."""
        found = [one for one in ast.walk(self.tree) if isinstance(one, ast.For) and self.numbers([one])]
        return tuple(sorted(found, key=lambda one: (one.lineno, one.col_offset)))

    def numbers(self, statements: Sequence[ast.stmt]) -> range:
        """The numbers of the hints in these statements, which follow each other."""
        inside = {id(node) for statement in statements for node in ast.walk(statement)}
        found = [number for number, one in enumerate(self.hints, 1) if id(one) in inside]
        return range(found[0], found[-1] + 1) if found else range(0)

    @cached_property
    def loops_around(self) -> dict[int, list[int]]:
        """The numbers of the `for` loops around each hint, outer ones first, by its number."""
        within = {loop: self.numbers([one]) for loop, one in enumerate(self.loops, 1)}
        hints = range(1, len(self.hints) + 1)
        return {number: [loop for loop, inside in within.items() if number in inside] for number in hints}

    @cached_property
    def live(self) -> dict[int, frozenset[str]]:
        """Variables that may be read after each hint, by its number: behind it, or anywhere in a loop around it."""
        code = self.function.__code__
        known = frozenset(code.co_varnames + code.co_cellvars)
        return {number: known & self._read_after(number) for number in range(1, len(self.hints) + 1)}

    def _read_after(self, number: int) -> set[str]:
        loops = [one for one in ast.walk(self.tree) if isinstance(one, ast.For | ast.While)]
        around = [one for one in loops if number in self.numbers([one])]  # outer ones first
        again = {id(node) for loop in around for node in ast.walk(loop)}
        items: set[str] = set()  # the body of the innermost loop finds new ones
        body: set[int] = set()
        if around and isinstance(around[-1], ast.For):
            targets = ast.walk(around[-1].target)
            items = {one.id for one in targets if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
            body = {id(node) for statement in around[-1].body for node in ast.walk(statement)}
        here = _place(self.hints[number - 1])
        return {
            name
            for node, name in _reads(self.tree)
            if _place(node) > here or (id(node) in again and not (name in items and id(node) in body))
        }

    def refuse(self, node: ast.AST, what: str) -> NotResumableError:
        """The error about a node."""
        return _refused(self.function, getattr(node, "lineno", self.tree.lineno), what)


def read_source(function: Any) -> FunctionSource:
    """Read a function's source, and look for what could not go on after a kill.

    Raises:
        NotResumableError: there is something of that kind, or no source, or no hint; names the line and the feature.
    """
    if not isinstance(function, FunctionType):
        raise NotResumableError(
            f"@resumable takes a function, not a {type(function).__name__}: put it directly above `def`"
        )
    code = function.__code__
    if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        raise _refused(function, code.co_firstlineno, "it is a generator or asynchronous: give it a plain `return`")
    if code.co_freevars:
        what = f"'{code.co_freevars[0]}' is a variable of the function around it: pass it as an argument"
        raise _refused(function, code.co_firstlineno, what)
    tree = _definition(function)
    calls = [one for one in ast.walk(tree) if isinstance(one, ast.Expr) and _is_hint(function, one.value)]
    source = FunctionSource(function, tree, tuple(sorted(calls, key=lambda one: one.lineno)))
    _check_features(source)
    _check_places(source, tree.body)
    return source


def _refused(function: FunctionType, line: int, what: str) -> NotResumableError:
    return NotResumableError(
        f"{function.__code__.co_filename}:{line}: {function.__qualname__} cannot be resumable: {what}"
    )


def _is_hint(function: FunctionType, node: ast.AST) -> bool:
    """Whether it is a call of `hint`, by whatever dotted name."""
    if not isinstance(node, ast.Call):
        return False
    names = ast.unparse(node.func).split(".")
    meant: Any = function.__globals__.get(names[0])
    for name in names[1:]:
        meant = getattr(meant, name, None)
    return meant is hint


def _definition(function: FunctionType) -> ast.FunctionDef:
    """The definition, compared with the code that runs."""
    code = function.__code__
    try:
        module = ast.parse("".join(inspect.findsource(code)[0]))
    except (OSError, TypeError, SyntaxError) as error:
        raise _refused(
            function, code.co_firstlineno, f"its source cannot be read ({error}): define it in a file"
        ) from error
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and _first_line(node) == code.co_firstlineno and node.name == code.co_name:
            if code not in _codes(compile(module, code.co_filename, "exec", dont_inherit=True)):
                break
            made = copy.copy(node)
            made.decorator_list = []
            return made
    what = "its file holds other code than runs, edited since or rewritten by a tool: load it again"
    raise _refused(function, code.co_firstlineno, what)


def _first_line(node: ast.FunctionDef) -> int:
    return min([node.lineno, *(one.lineno for one in node.decorator_list)])


def _codes(code: CodeType) -> list[CodeType]:
    """All code in a module, functions in classes and functions as well."""
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    return [*inner, *(one for each in inner for one in _codes(each))]


def _check_features(source: FunctionSource) -> None:
    if not source.hints:
        raise source.refuse(source.tree, "it has no `hint()`: write one in its loops, or between its steps")
    standing = {id(one.value) for one in source.hints if isinstance(one, ast.Expr)}
    arguments = {one.arg for one in ast.walk(source.tree.args) if isinstance(one, ast.arg)}
    for node in ast.walk(source.tree):
        match node:
            case ast.Global() | ast.Nonlocal():
                raise source.refuse(node, f"it assigns the global '{node.names[0]}': return the value instead")
            case ast.Name(id=name) if name in _LOOK_INSIDE:
                raise source.refuse(node, f"{name}() sees or changes variables unseen: name them")
            case ast.Name(id=name) if name.startswith("_cpsr"):
                raise source.refuse(node, f"'{name}' begins with _cpsr: give it another name")
            case ast.Name(id=name, ctx=ast.Del()) if name in arguments:
                raise source.refuse(node, f"it deletes the argument '{name}'")
            case ast.Call() if _is_hint(source.function, node) and id(node) not in standing:
                raise source.refuse(node, "`hint()` is no statement of its own here: put it on a line of its own")


def _check_places(source: FunctionSource, statements: Sequence[ast.stmt]) -> None:
    """Whether the function can go on at each of its hints."""
    for statement in statements:
        if statement in source.hints or not source.numbers([statement]):
            continue
        if not isinstance(statement, ast.For | ast.While | ast.If):
            kind = {ast.With: "with", ast.Try: "try", ast.Match: "match"}.get(type(statement), type(statement).__name__)
            raise source.refuse(statement, f"a hint inside `{kind}` cannot be entered again: move one out of the other")
        _check_places(source, statement.body)
        if isinstance(statement, ast.If):
            _check_places(source, statement.orelse)
        elif source.numbers(statement.orelse):
            raise source.refuse(statement.orelse[0], "a hint in the `else` of a loop: move it behind the loop")


def _reads(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Every name that is read, changed or deleted, inside lambdas and comprehensions as well."""
    for one in ast.walk(tree):
        if isinstance(one, ast.AugAssign) and isinstance(one.target, ast.Name):
            yield one, one.target.id
        elif isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Store):
            yield one, one.id


def _place(node: Any) -> tuple[int, int]:
    return node.lineno, node.col_offset
