"""A function with hints, written so that it can begin at any of them.

Loops stay loops and branches stay branches, so `break`, `continue`, `return` and exceptions do what they did. What
comes before the hint to go on from is skipped:

- statements without hints, unless the function runs from its begin;
- the tests of `if` and `while`, which lead to the hint instead;
- the next item of a `for` loop, whose iterator is one of the saved variables.

With the number of that hint in `_cpsr.target`, else 0, this loop

    for x in items:
        step(x)
        hint()

becomes

    if not _cpsr.target:
        _cpsr_1 = _cpsr.iterate(items, 1)
    for _cpsr_item in _cpsr.loop(_cpsr_1, 1, 1):
        if not _cpsr.target:
            x = _cpsr_item
            step(x)
        if _cpsr.due(1):
            _cpsr.save(1, 0, _cpsr.locals())
"""

import ast
import copy
from collections.abc import Sequence
from types import FunctionType
from typing import TypeVar

from cpsr.hints.compiled import compiled_function
from cpsr.hints.source import OWN, FunctionSource

__all__ = ["rewritten"]

_Node = TypeVar("_Node", bound=ast.AST)
_VIEWS = ("keys", "values", "items")


def rewritten(source: FunctionSource, variables: Sequence[str]) -> FunctionType:
    """The function with one more argument before the others, a `cpsr.hints.call.Call`.

    Args:
        source: of the function.
        variables: every variable that is restored at some hint.
    """
    old = source.function
    new = _Writer(source).function(variables)
    made = FunctionType(
        compiled_function(new, old.__code__.co_filename, old.__code__.co_flags), old.__globals__, old.__name__
    )
    made.__defaults__, made.__kwdefaults__ = old.__defaults__, old.__kwdefaults__
    return made


class _Writer:
    def __init__(self, source: FunctionSource) -> None:
        self._source = source
        self._numbers = {id(one): number for number, one in enumerate(source.hints, 1)}

    def function(self, variables: Sequence[str]) -> ast.FunctionDef:
        """The definition, whose statements before the first hint are those that restore the variables."""
        old = self._source.tree
        made, given = copy.copy(old), copy.deepcopy(old.args)
        own = {one.arg for one in ast.walk(given) if isinstance(one, ast.arg)}
        (given.posonlyargs or given.args).insert(0, ast.arg(OWN))
        restored = [
            f"    if {OWN}.has({name!r}): {name} = {OWN}.take({name!r})\n"
            + (f"    elif {OWN}.lacks({name!r}): del {name}\n" if name in own else "")
            for name in variables
        ]
        begin = _statements(f"if {OWN}.target:\n{''.join(restored) or '    pass'}", old)
        made.args, made.body = given, [*begin, *self._block(old.body)]
        return ast.fix_missing_locations(made)

    def _block(self, statements: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Statements of which those before the hint are skipped; none is behind the last hint when one is sought."""
        made: list[ast.stmt] = []
        before: list[ast.stmt] = []
        for statement in statements:
            first, last = self._source.numbers([statement])
            if not first:
                before.append(statement)
                continue
            made += self._skipped(before)
            before = []
            written = self._at_hint(statement)
            made += self._only_if(f"{OWN}.enters({first}, {last})", written, statement)
        return [*made, *before]

    def _skipped(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        return self._only_if(f"not {OWN}.target", statements, statements[0]) if statements else []

    @staticmethod
    def _only_if(test: str, statements: list[ast.stmt], where: ast.stmt) -> list[ast.stmt]:
        return [_located(ast.If(_expression(test, where), statements, []), where)]

    def _at_hint(self, statement: ast.stmt) -> list[ast.stmt]:
        """One statement with hints in it."""
        if id(statement) in self._numbers:
            number = self._numbers[id(statement)]
            depth = self._source.depth(statement)
            return _statements(f"if {OWN}.due({number}):\n    {OWN}.save({number}, {depth}, {OWN}.locals())", statement)
        match statement:
            case ast.For():
                return self._for(statement)
            case ast.While() | ast.If():
                first, last = self._source.numbers(statement.body)
                test = _expression(f"{OWN}.inside({first}, {last}) if {OWN}.target else None", statement)
                assert isinstance(test, ast.IfExp)
                test.orelse = statement.test
                kind = type(statement)
                return [_located(kind(test, self._block(statement.body), self._block(statement.orelse)), statement)]
            case ast.With():
                depth = self._source.depth(statement)
                entering = _statements(f"{OWN}.entering({depth})", statement)
                entered = _statements(f"{OWN}.entered({depth + 1})", statement)
                body = [*entered, *self._block(statement.body)]
                return [*entering, _located(ast.With(statement.items, body), statement)]
            case ast.Try() | ast.TryStar():
                first, last = self._source.numbers(statement.body)
                body = self._only_if(f"{OWN}.enters({first}, {last})", self._block(statement.body), statement)
                orelse = self._block(statement.orelse)
                return [_located(type(statement)(body, statement.handlers, orelse, statement.finalbody), statement)]
        raise AssertionError(ast.dump(statement))  # `read_source` refuses it

    def _for(self, loop: ast.For) -> list[ast.stmt]:
        name, number = self._source.iterator(loop), self._source.loops.index(loop) + 1
        first, last = self._source.numbers(loop.body)
        begin = _statements(
            f"if not {OWN}.target:\n"
            f"    {name} = {OWN}.iterate(None, {number})\n"
            f"elif not {OWN}.inside({first}, {last}):\n"
            f"    {name} = ()",
            loop,
        )
        (test,) = begin
        assert isinstance(test, ast.If)
        (assigned,) = test.body
        assert isinstance(assigned, ast.Assign)
        assert isinstance(assigned.value, ast.Call)
        assigned.value.args[0] = self._repeatable(loop.iter)
        item = f"{OWN}_item"
        taken = _located(ast.Assign([loop.target], _expression(item, loop)), loop)
        # Without hints in the body one in `else` is sought, and the loop has nothing to do.
        body = self._block([taken, *loop.body]) if first else [taken, *loop.body]
        over = _expression(f"{OWN}.loop({name}, {first}, {last})", loop)
        target = _located(ast.Name(item, ast.Store()), loop)
        return [*begin, _located(ast.For(target, over, body, self._block(loop.orelse)), loop)]

    def _repeatable(self, node: ast.expr) -> ast.expr:
        """What a loop goes over, with mappings and their views taken so that one can begin in the middle."""
        value, view = node, ""
        if isinstance(node, ast.Call):
            if self._source.resolve(node.func) in (enumerate, zip):
                arguments = [self._repeatable(one) for one in node.args]
                return _located(ast.Call(node.func, arguments, node.keywords), node)
            if isinstance(node.func, ast.Attribute) and node.func.attr in _VIEWS and not node.args + node.keywords:
                value, view = node.func.value, node.func.attr
        if isinstance(node, ast.Starred):
            return node
        made = _expression(f"{OWN}.view(None, {view!r})", node)
        assert isinstance(made, ast.Call)
        made.args[0] = value
        return made


def _statements(text: str, where: ast.AST) -> list[ast.stmt]:
    found = ast.parse(text).body
    for statement in found:
        for one in ast.walk(statement):
            ast.copy_location(one, where)
            if isinstance(one, ast.expr | ast.stmt):  # where it begins: Python has calls in the last of several lines
                one.end_lineno, one.end_col_offset = one.lineno, one.col_offset
    return found


def _expression(text: str, where: ast.AST) -> ast.expr:
    (statement,) = _statements(text, where)
    assert isinstance(statement, ast.Expr)
    return statement.value


def _located(node: _Node, where: ast.AST) -> _Node:
    return ast.copy_location(node, where)
