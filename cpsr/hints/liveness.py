"""Which variables a function still reads after each of its hints.

Backwards through the syntax tree. Where it is not clear whether a variable is read or written, it counts as read: one
variable too many is saved, never one too few. A variable that has no value yet is left out when it is saved.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cpsr.hints.source import OWN, FunctionSource

__all__ = ["Liveness", "live_variables"]

Names = frozenset[str]
_NONE: Names = frozenset()


@dataclass(frozen=True)
class Liveness:
    """What is read after each hint, by its number: variables, and the iterators of the loops around it."""

    at: dict[int, Names]

    @property
    def everywhere(self) -> list[str]:
        """All of the names, sorted."""
        return sorted(frozenset().union(*self.at.values()))


def live_variables(source: FunctionSource) -> Liveness:
    """What is read after each hint of a function."""
    found = _Backwards(source)
    found.block(source.tree.body, _NONE, _Exits())
    known = source.variables
    return Liveness({hint: frozenset(n for n in names if n in known or n.startswith(OWN)) for hint, names in found.at})


@dataclass(frozen=True)
class _Exits:
    """What is read where a statement is left early: by an exception, `break`, `continue` and `return`."""

    error: Names = _NONE
    broken: Names = _NONE
    next: Names = _NONE
    returned: Names = _NONE

    @property
    def any(self) -> Names:
        return self.error | self.broken | self.next | self.returned


class _Backwards:
    def __init__(self, source: FunctionSource) -> None:
        self._source = source
        self._numbers = {id(one): number for number, one in enumerate(source.hints, 1)}
        self._at: dict[int, Names] = {}

    @property
    def at(self) -> list[tuple[int, Names]]:
        return sorted(self._at.items())

    def block(self, statements: Sequence[ast.stmt], after: Names, exits: _Exits) -> Names:
        """What is read before statements, if `after` is read after them."""
        for statement in reversed(statements):
            after = self._statement(statement, after, exits) | exits.error
        return after

    def _statement(self, node: ast.stmt, after: Names, exits: _Exits) -> Names:
        if id(node) in self._numbers:
            number = self._numbers[id(node)]
            self._at[number] = self._at.get(number, _NONE) | after | exits.error
            return after
        match node:
            case ast.For():
                return self._for(node, after, exits)
            case ast.While():
                return self._while(node, after, exits)
            case ast.If():
                either = self.block(node.body, after, exits) | self.block(node.orelse, after, exits)
                return _read(node.test) | either
            case ast.Try() | ast.TryStar():
                return self._try(node, after, exits)
            case ast.With():
                return self._with(node, after, exits)
            case ast.Match():
                bodies = [self.block(case.body, after, exits) for case in node.cases]
                return _read(node.subject, *node.cases) | after.union(*bodies)
        return _simple(node, after, exits)

    def _for(self, node: ast.For, after: Names, exits: _Exits) -> Names:
        own = _NONE
        if self._source.numbers([node]) != (0, -1):
            own = frozenset([self._source.iterator(node)])
        first, last = self._source.numbers(node.body)
        ended = self.block(node.orelse, after, exits)
        head = ended | own
        while True:
            inner = replace(exits, broken=after, next=head)
            grown = head | _read(node.target) | (self.block(node.body, head, inner) - _written(node.target))
            if grown == head:
                for hint in range(first, last + 1):  # the loop is entered with it, even if it is left after the hint
                    self._at[hint] |= own
                return _read(node.iter) | (head - own)
            head = grown

    def _while(self, node: ast.While, after: Names, exits: _Exits) -> Names:
        head = _read(node.test) | self.block(node.orelse, after, exits)
        while True:
            grown = head | self.block(node.body, head, replace(exits, broken=after, next=head))
            if grown == head:
                return head
            head = grown

    def _try(self, node: ast.Try | ast.TryStar, after: Names, exits: _Exits) -> Names:
        # However the statement is left, `finally` runs first, and the exits see it.
        final = self.block(node.finalbody, after | exits.any, exits) if node.finalbody else _NONE
        outer = (
            _Exits(*[final | one for one in (exits.error, exits.broken, exits.next, exits.returned)])
            if node.finalbody
            else exits
        )
        end = final or after
        handled = outer.error
        for handler in node.handlers:
            named = frozenset([handler.name]) if handler.name else _NONE
            body = self.block(handler.body, end, outer) - named
            handled |= body | (_read(handler.type) if handler.type else _NONE)
        ended = self.block(node.orelse, end, outer)
        return self.block(node.body, ended, replace(outer, error=handled)) | handled

    def _with(self, node: ast.With, after: Names, exits: _Exits) -> Names:
        # A manager may swallow an exception, and the function goes on after the block.
        inside = self.block(node.body, after, replace(exits, error=exits.error | after))
        for item in reversed(node.items):
            if item.optional_vars is not None:
                inside = (inside - _written(item.optional_vars)) | _read(item.optional_vars)
            inside |= _read(item.context_expr)
        return inside | after


def _simple(node: ast.stmt, after: Names, exits: _Exits) -> Names:
    """A statement without others in it, and without hints."""
    match node:
        case ast.Return():
            after = exits.returned
        case ast.Raise():
            after = exits.error
        case ast.Break():
            after = exits.broken
        case ast.Continue():
            after = exits.next
        case ast.AugAssign() | ast.Delete():
            after |= _written(node.target if isinstance(node, ast.AugAssign) else node)
        case _:
            after -= _bound(node)
    return after | _read(node)


def _bound(node: ast.stmt) -> Names:
    """Names that a statement certainly binds anew."""
    match node:
        case ast.Assign():
            return _NONE.union(*map(_written, node.targets))
        case ast.AnnAssign() if node.value is not None:
            return _written(node.target)
        case ast.FunctionDef() | ast.ClassDef() | ast.AsyncFunctionDef():
            return frozenset([node.name])
        case ast.Import() | ast.ImportFrom():
            return frozenset((one.asname or one.name).split(".")[0] for one in node.names)
    return _NONE


def _read(*nodes: ast.AST) -> Names:
    """Every name that is read anywhere in these nodes, inside lambdas and comprehensions as well."""
    return frozenset(
        one.id
        for node in nodes
        for one in ast.walk(node)
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)
    )


def _written(node: ast.AST) -> Names:
    """Names that a target binds, whatever it is."""
    match node:
        case ast.Name():
            return frozenset([node.id])
        case ast.Tuple() | ast.List():
            return frozenset().union(*map(_written, node.elts))
        case ast.Starred():
            return _written(node.value)
        case ast.Delete():
            return frozenset().union(*map(_written, node.targets))
    return _NONE
