"""A function's syntax tree as code: the one place of the library that compiles.

What it compiles is the source of a function that the program has loaded already, never a file of a run directory.
"""

import ast
from types import CodeType

__all__ = ["code_at", "compiled_function"]

_FUTURE = 0xFFE0000  # flags of `from __future__ import ...`


def code_at(module: ast.Module, file: str, name: str, line: int) -> CodeType | None:
    """The code of a function in a whole module, by its name and first line; None if it is not there."""
    found = [compile(module, file, "exec", 0, True)]
    while found:
        one = found.pop()
        if (one.co_name, one.co_firstlineno) == (name, line):
            return one
        found += [inner for inner in one.co_consts if isinstance(inner, CodeType)]
    return None


def compiled_function(tree: ast.FunctionDef, file: str, flags: int) -> CodeType:
    """The code of a function; nothing is executed.

    Args:
        tree: its definition, with lines.
        file: where these lines are.
        flags: of the compiler, of which those of `from __future__ import ...` count.
    """
    module = compile(ast.Module([tree], []), file, "exec", flags & _FUTURE, True)
    return next(one for one in module.co_consts if isinstance(one, CodeType) and one.co_name == tree.name)
