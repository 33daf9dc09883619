"""Variables that are needed after a hint, and hold what no checkpoint can: refused before the function runs."""

import ast
import builtins
from collections.abc import Iterator

from cpsr.hints.liveness import Liveness
from cpsr.hints.source import FunctionSource

__all__ = ["refuse_live"]


def refuse_live(source: FunctionSource, live: Liveness) -> None:
    """Look at what is assigned to the variables that are saved.

    Raises:
        NotResumableError: a function, a module, a generator or an open file; names the line and the variable.
    """
    needed = frozenset(live.everywhere)
    for line, name, what in _unsavable(source):
        if name in needed:
            raise source.refuse(line, f"the variable '{name}' holds {what}, and is needed after a hint")


def _unsavable(source: FunctionSource) -> Iterator[tuple[int, str, str]]:
    """Line, variable, and what it holds."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for one in node.names:
                yield node.lineno, (one.asname or one.name).split(".")[0], "a module: import it outside the function"
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node is not source.tree:
            yield node.lineno, node.name, "a function or a class: define it outside this one"
        for line, target, value in _assigned(node):
            what = _kind(source, value)
            if what and isinstance(target, ast.Name):
                yield line, target.id, what


def _assigned(node: ast.AST) -> Iterator[tuple[int, ast.expr | None, ast.expr]]:
    """Line, target and value of every assignment."""
    match node:
        case ast.With():
            yield from ((node.lineno, one.optional_vars, one.context_expr) for one in node.items)
        case ast.Assign():
            yield from ((node.lineno, one, node.value) for one in node.targets)
        case ast.AnnAssign(value=ast.expr() as value) | ast.NamedExpr(value=value):
            yield node.lineno, node.target, value


def _kind(source: FunctionSource, value: ast.expr) -> str | None:
    if isinstance(value, ast.Lambda):
        return "a lambda: define the function outside this one"
    if isinstance(value, ast.GeneratorExp):
        return "a generator: make it a list"
    if isinstance(value, ast.Set | ast.SetComp):
        return "a set, whose order differs from start to start: use dict.fromkeys(...)"
    if not isinstance(value, ast.Call):
        return None
    called = source.resolve(value.func)
    if called is builtins.open or (isinstance(value.func, ast.Attribute) and value.func.attr == "open"):
        return "an open file: open it anew after each hint"
    if called in (map, filter):
        return "an iterator that goes one way: make it a list"
    if called in (set, frozenset):
        return "a set, whose order differs from start to start: use dict.fromkeys(...)"
    return None
