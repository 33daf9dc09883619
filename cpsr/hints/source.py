"""The source of a function with hints: where its hints are, and what in it could not go on after a kill."""

import ast
import builtins
import decimal
import inspect
import locale
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy
import torch

from cpsr.errors import NotResumableError
from cpsr.hints.compiled import code_at

__all__ = ["OWN", "FunctionSource", "hint", "read_source"]

OWN = "_cpsr"  # how the names that are put into a function begin

_REENTERED = (  # managers that do the same when they are entered again, with the same arguments
    torch.no_grad,
    torch.enable_grad,
    torch.inference_mode,
    torch.set_grad_enabled,
    torch.autocast,
    numpy.errstate,
    suppress,
    nullcontext,
)
_LOOK_INSIDE = (builtins.locals, builtins.vars, builtins.globals, builtins.eval, builtins.exec)
_ONE_WAY = (builtins.map, builtins.filter, builtins.open, builtins.iter)
_CHANGING = (
    "add",
    "append",
    "clear",
    "discard",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "setdefault",
    "update",
)
_SETTERS = (  # of what holds for the whole process, and is set anew by no checkpoint
    *(torch.set_default_dtype, torch.set_default_device, torch.set_default_tensor_type, torch.set_grad_enabled),
    *(torch.set_num_threads, torch.use_deterministic_algorithms, torch.set_deterministic_debug_mode),
    *(torch.set_float32_matmul_precision, torch.set_flush_denormal, torch.set_printoptions),
    *(numpy.seterr, numpy.seterrcall, numpy.setbufsize, numpy.set_printoptions, decimal.setcontext),
    *(os.chdir, os.umask, os.putenv, os.unsetenv, locale.setlocale, sys.setrecursionlimit),
    *(warnings.simplefilter, warnings.filterwarnings),
)
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
_COMPOUND = (ast.For, ast.While, ast.If, ast.Try, ast.TryStar, ast.With)


def hint() -> None:
    """Mark a place where a checkpoint could be taken; does nothing outside a function that is `resumable`."""


@dataclass(frozen=True)
class FunctionSource:
    """A function whose hints are all at places where it can go on.

    Attributes:
        function: the function itself.
        tree: its definition without decorators, with the lines of its file.
        hints: the statements `hint()`, in the order of the program; the first one has number 1.
        variables: names of its arguments and local variables.
    """

    function: FunctionType
    tree: ast.FunctionDef
    hints: tuple[ast.Expr, ...]
    variables: frozenset[str]

    @cached_property
    def loops(self) -> tuple[ast.For, ...]:
        """The `for` loops with hints in them, in the order of the program."""
        found = [one for one in ast.walk(self.tree) if isinstance(one, ast.For) and self.numbers([one]) != (0, -1)]
        return tuple(sorted(found, key=lambda one: (one.lineno, one.col_offset)))

    def iterator(self, loop: ast.For) -> str:
        """The variable that holds the iterator of a loop with hints in it."""
        return f"{OWN}_{self.loops.index(loop) + 1}"

    def resolve(self, node: ast.AST) -> Any:
        """What a dotted name means outside the function; None for a local variable or another expression."""
        return _resolve(node, self.function.__globals__, self.variables)

    def numbers(self, statements: Sequence[ast.stmt]) -> tuple[int, int]:
        """First and last number of the hints in these statements; (0, -1) without any."""
        inside = {id(node) for statement in statements for node in ast.walk(statement)}
        found = [number for number, one in enumerate(self.hints, 1) if id(one) in inside]
        return (found[0], found[-1]) if found else (0, -1)

    def depth(self, statement: ast.stmt) -> int:
        """How many `with` are around a statement with hints in it."""
        found = [one for one in ast.walk(self.tree) if isinstance(one, ast.With) and one is not statement]
        return sum(any(inner is statement for inner in ast.walk(one)) for one in found)

    def refuse(self, node: ast.AST | int, what: str) -> NotResumableError:
        """The error about a node, or a line."""
        return _refused(self.function, node if isinstance(node, int) else getattr(node, "lineno", 0), what)


def read_source(function: Any) -> FunctionSource:
    """Read a function's source, and look for what could not go on after a kill.

    Raises:
        NotResumableError: there is something of that kind, or no source, or no hint; names the line and the variable.
    """
    if not isinstance(function, FunctionType):
        raise NotResumableError(
            f"@resumable takes a function, not a {type(function).__name__}: put it directly above `def`"
        )
    code = function.__code__
    if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        raise _refused(function, code.co_firstlineno, "it is a generator or asynchronous: give it a plain `return`")
    if code.co_freevars:
        raise _refused(
            function, code.co_firstlineno, f"'{code.co_freevars[0]}' is of the function around it: pass it as argument"
        )
    tree = _parsed(function)
    variables = frozenset(code.co_varnames) | frozenset(code.co_cellvars)
    expressions = [one for one in ast.walk(tree) if isinstance(one, ast.Expr)]
    found = [one for one in expressions if _is_hint(one, function.__globals__, variables)]
    hints = tuple(sorted(found, key=lambda one: (one.lineno, one.col_offset)))
    source = FunctionSource(function, tree, hints, variables)
    _check_names(source)
    _check_captures(source, code)
    _check_hints(source, tree.body)
    return source


def _resolve(node: ast.AST, scope: Mapping[str, Any], variables: frozenset[str]) -> Any:
    if isinstance(node, ast.Name):
        return None if node.id in variables else scope.get(node.id, getattr(builtins, node.id, None))
    if isinstance(node, ast.Attribute):
        owner = _resolve(node.value, scope, variables)
        return getattr(owner, node.attr, None) if isinstance(owner, ModuleType) else None
    return None


def _is_hint(node: ast.Expr, scope: Mapping[str, Any], variables: frozenset[str]) -> bool:
    call = node.value
    if not isinstance(call, ast.Call):
        return False
    return not call.args and not call.keywords and _resolve(call.func, scope, variables) is hint


def _refused(function: FunctionType, line: int, what: str) -> NotResumableError:
    file = function.__code__.co_filename
    return NotResumableError(f"{file}:{line}: {function.__qualname__} cannot be resumable: {what}")


def _parsed(function: FunctionType) -> ast.FunctionDef:
    code = function.__code__
    file, first = code.co_filename, code.co_firstlineno
    try:
        module = ast.parse("".join(inspect.findsource(code)[0]))
    except (OSError, TypeError, SyntaxError) as error:
        raise _refused(function, first, f"its source cannot be read ({error}): define it in a file") from error
    compiled = code_at(module, file, code.co_name, first)
    if compiled is None or not _same_code(compiled, code):
        raise _refused(
            function, first, "its file holds other code than runs, edited since or rewritten by a tool: load it again"
        )
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and _first_line(node) == first and node.name == code.co_name:
            node.decorator_list = []
            _check_private(function, module, node)
            return node
    raise _refused(function, first, "it is no `def`: write it as one")


def _check_private(function: FunctionType, module: ast.Module, tree: ast.FunctionDef) -> None:
    """Names that Python writes otherwise within a class, where the rewritten function does not stand."""
    classes = [one for one in ast.walk(module) if isinstance(one, ast.ClassDef)]
    if not any(node is tree for one in classes for node in ast.walk(one)):
        return
    for node in ast.walk(tree):
        for name in (getattr(node, key, None) for key in ("id", "attr", "arg", "name")):
            if isinstance(name, str) and name.startswith("__") and not name.endswith("__"):
                raise _refused(
                    function, getattr(node, "lineno", tree.lineno), f"'{name}' is a private name of a class: rename it"
                )


def _first_line(node: ast.FunctionDef) -> int:
    return min([node.lineno, *(one.lineno for one in node.decorator_list)])


def _same_code(one: CodeType, other: CodeType) -> bool:
    """Whether two pieces of code do the same; lines and columns may differ."""
    if (one.co_code, one.co_names, one.co_varnames, one.co_cellvars, len(one.co_consts)) != (
        other.co_code,
        other.co_names,
        other.co_varnames,
        other.co_cellvars,
        len(other.co_consts),
    ):
        return False
    return all(
        _same_code(mine, theirs)
        if isinstance(mine, CodeType) and isinstance(theirs, CodeType)
        else (type(mine), mine) == (type(theirs), theirs)
        for mine, theirs in zip(one.co_consts, other.co_consts, strict=True)
    )


def _check_names(source: FunctionSource) -> None:
    """Assigned globals, looks at all variables at once, and hints that are no statements."""
    if not source.hints:
        raise source.refuse(source.tree, "it has no `hint()`: write one in its loops, or between its steps")
    names = {id(one.value.func) for one in source.hints if isinstance(one.value, ast.Call)}
    calls = [item.context_expr for one in ast.walk(source.tree) if isinstance(one, ast.With) for item in one.items]
    managers = {id(one.func) for one in calls if isinstance(one, ast.Call)}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global | ast.Nonlocal):
            raise source.refuse(node, f"it assigns the global '{node.names[0]}': return the value instead")
        if not isinstance(node, ast.Name | ast.Attribute):
            continue
        meant = source.resolve(node)
        if meant is hint and id(node) not in names:
            raise source.refuse(node, "`hint()` is no statement of its own here: put it on a line of its own")
        if meant in _LOOK_INSIDE if callable(meant) else False:
            raise source.refuse(node, f"{ast.unparse(node)}() sees or changes variables unseen: name them")
        if callable(meant) and meant in _SETTERS and id(node) not in managers:
            raise source.refuse(node, f"{ast.unparse(node)} sets what no checkpoint has: call it before the function")
    _check_globals(source)
    if taken := sorted(name for name in source.variables if name.startswith(OWN)):
        raise source.refuse(source.tree, f"'{taken[0]}' begins with {OWN}: give it another name")


def _check_globals(source: FunctionSource) -> None:
    """Changes inside globals, as far as they can be seen: no checkpoint has them."""
    for node in ast.walk(source.tree):
        changed: ast.expr | None = None
        if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            changed = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING:
            found = source.resolve(node.func.value)
            changed = node.func.value if isinstance(found, list | dict | set | bytearray) else None
        while isinstance(changed, ast.Subscript | ast.Attribute):
            changed = changed.value
        if isinstance(changed, ast.Name) and changed.id not in source.variables:
            raise source.refuse(node, f"it changes the global '{changed.id}': pass it as an argument")


def _check_captures(source: FunctionSource, code: CodeType) -> None:
    """Functions inside that keep hold of a variable, which may change; comprehensions end where they stand."""
    for inner in code.co_consts:
        if not isinstance(inner, CodeType):
            continue
        if inner.co_freevars and inner.co_name not in _COMPREHENSIONS:
            name, kept = inner.co_name, inner.co_freevars[0]
            raise source.refuse(
                inner.co_firstlineno, f"{name} keeps hold of the variable '{kept}': give it as default, {kept}={kept}"
            )
        _check_captures(source, inner)


def _check_hints(source: FunctionSource, statements: Sequence[ast.stmt]) -> None:
    """Whether the function can go on at each of its hints."""
    for statement in statements:
        if statement in source.hints or source.numbers([statement]) == (0, -1):
            continue
        if not isinstance(statement, _COMPOUND):
            kind = type(statement).__name__
            raise source.refuse(statement, f"a hint inside `{kind}` cannot be entered again: move it out of there")
        if isinstance(statement, ast.With):
            _check_with(source, statement)
        if isinstance(statement, ast.For):
            _check_for(source, statement)
        if isinstance(statement, ast.Try | ast.TryStar):
            for inner in [*(one for handler in statement.handlers for one in handler.body), *statement.finalbody]:
                if source.numbers([inner]) != (0, -1):
                    raise source.refuse(
                        inner, "the exception that led to this hint cannot be saved: move it behind the `try`"
                    )
        for body in _bodies(statement):
            _check_hints(source, body)


def _bodies(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse"):
        yield getattr(statement, name, [])


def _check_with(source: FunctionSource, statement: ast.With) -> None:
    for item in statement.items:
        call = item.context_expr
        known = isinstance(call, ast.Call) and source.resolve(call.func) in _REENTERED
        same = known and isinstance(call, ast.Call) and all(_is_fixed(source, one) for one in _arguments(call))
        if item.optional_vars is not None or not same:
            name = ast.unparse(item.optional_vars or call)
            raise source.refuse(
                statement, f"`with` around a hint would open '{name}' again: move the hint out, or the `with` in"
            )


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(one.value for one in call.keywords)]


def _is_fixed(source: FunctionSource, node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) or source.resolve(node) is not None


def _check_for(source: FunctionSource, statement: ast.For) -> None:
    found = statement.iter
    one_way = isinstance(found, ast.Call) and source.resolve(found.func) in _ONE_WAY
    if isinstance(found, ast.GeneratorExp) or one_way:
        raise source.refuse(
            statement, f"its loop cannot begin in the middle of '{ast.unparse(found)}': make it a list first"
        )
