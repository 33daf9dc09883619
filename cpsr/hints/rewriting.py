"""A function with hints, written so that it can begin at any of them.

Loops stay loops and branches stay branches, so `break`, `continue`, `return` and exceptions do what they did. What
comes before the hint to go on from is skipped. With the number of that hint in `_cpsr.target`, else 0, this loop

    for x in items:
        step(x)
        hint()

becomes

    if not _cpsr.target:
        _cpsr.begin_loop(1, items)
    for _cpsr_item in _cpsr.items(1, 1, 1):
        if not _cpsr.target:
            x = _cpsr_item
            step(x)
        if _cpsr.due(1):
            _cpsr.save(1, _cpsr.locals())

What is compiled is the source of a function that the program has loaded already, never a file of a run directory.
"""

import ast
import copy
from collections.abc import Sequence
from types import CodeType, FunctionType

from cpsr.hints.source import FunctionSource

__all__ = ["rewritten"]

_FUTURE = 0xFFE0000  # compiler's flags of `from __future__ import ...`


def rewritten(source: FunctionSource) -> FunctionType:
    """The function with one more argument before the others, a `cpsr.hints.call.Call`.

    Raises:
        NotResumableError: a loop with hints goes over something that cannot begin in the middle.
    """
    old = source.function
    tree = ast.fix_missing_locations(_Writer(source).function())
    code = old.__code__
    module = compile(ast.Module([tree], []), code.co_filename, "exec", code.co_flags & _FUTURE, dont_inherit=True)
    body = next(one for one in module.co_consts if isinstance(one, CodeType) and one.co_name == tree.name)
    made = FunctionType(body, old.__globals__, old.__name__)
    made.__defaults__, made.__kwdefaults__ = old.__defaults__, old.__kwdefaults__
    return made


class _Writer:
    def __init__(self, source: FunctionSource) -> None:
        self._source = source

    def function(self) -> ast.FunctionDef:
        """The definition, whose statements before the first hint are those that restore the variables."""
        old = self._source.tree
        made, given = copy.copy(old), copy.deepcopy(old.args)
        (given.posonlyargs or given.args).insert(0, ast.arg("_cpsr"))
        names = sorted(frozenset[str]().union(*self._source.live.values()))
        restored = "".join(f"    if _cpsr.has({name!r}): {name} = _cpsr.restored({name!r})\n" for name in names)
        begin = _statements(f"if _cpsr.target:\n{restored or '    pass'}", old)
        made.args, made.body = given, [*begin, *self._block(old.body)]
        return made

    def _block(self, statements: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Statements of which those before the hint are skipped; none is behind the last hint when one is sought."""
        made: list[ast.stmt] = []
        before: list[ast.stmt] = []
        for statement in statements:
            numbers = self._source.numbers([statement])
            if not numbers:
                before.append(statement)
                continue
            if before:
                made.append(_only_if("not _cpsr.target", before))
            before = []
            test = f"not _cpsr.target or {numbers[0]} <= _cpsr.target <= {numbers[-1]}"
            made.append(_only_if(test, self._at_hint(statement)))
        return [*made, *before]

    def _at_hint(self, statement: ast.stmt) -> list[ast.stmt]:
        """One statement with hints in it."""
        match statement:
            case ast.For():
                return self._for(statement)
            case ast.While() | ast.If():
                numbers = self._source.numbers(statement.body)
                inside = f"{numbers[0]} <= _cpsr.target <= {numbers[-1]}" if numbers else "False"
                test = _expression(f"({inside}) if _cpsr.target else None", statement)
                assert isinstance(test, ast.IfExp)
                test.orelse = statement.test
                made = type(statement)(test, self._block(statement.body), self._block(statement.orelse))
                return [ast.copy_location(made, statement)]
        number = self._source.hints.index(statement) + 1
        return _statements(f"if _cpsr.due({number}):\n    _cpsr.save({number}, _cpsr.locals())", statement)

    def _for(self, loop: ast.For) -> list[ast.stmt]:
        number, numbers = self._source.loops.index(loop) + 1, self._source.numbers(loop.body)
        begin = _expression(f"_cpsr.begin_loop({number})", loop)
        assert isinstance(begin, ast.Call)
        begin.args.append(loop.iter)
        over = _expression(f"_cpsr.items({number}, {numbers[0]}, {numbers[-1]})", loop)
        taken = ast.copy_location(ast.Assign([loop.target], _expression("_cpsr_item", loop)), loop)
        target = ast.copy_location(ast.Name("_cpsr_item", ast.Store()), loop)
        made = ast.For(target, over, self._block([taken, *loop.body]), loop.orelse)
        return [_only_if("not _cpsr.target", [ast.copy_location(ast.Expr(begin), loop)]), ast.copy_location(made, loop)]


def _only_if(test: str, statements: list[ast.stmt]) -> ast.stmt:
    where = statements[0]
    return ast.copy_location(ast.If(_expression(test, where), statements, []), where)


def _statements(text: str, where: ast.AST) -> list[ast.stmt]:
    found = ast.parse(text).body
    for node in (node for statement in found for node in ast.walk(statement)):
        ast.copy_location(node, where)
        if isinstance(node, ast.expr | ast.stmt):  # where it begins: Python has calls in the last of several lines
            node.end_lineno, node.end_col_offset = node.lineno, node.col_offset
    return found


def _expression(text: str, where: ast.AST) -> ast.expr:
    (statement,) = _statements(text, where)
    assert isinstance(statement, ast.Expr)
    return statement.value
