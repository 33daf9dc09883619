"""The messages of all errors, read from the source where they are raised."""

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cpsr import errors
from cpsr.errors import CPSRError

__all__ = ["FOLDERS", "ROOT", "found", "text"]

ROOT = Path(__file__).parents[2]
FOLDERS = ("cpsr", "predictor", "fitter", "service")
WORDS = re.compile(r"[A-Za-z]{3,}")
REASONS = {"UnsavableError"}  # raised below the function that knows the name of the value


@cache
def found() -> dict[str, list[str]]:
    """Messages by the class of `cpsr.errors` whose section explains them; in angle brackets what is filled in."""
    modules = {path: ast.parse(path.read_text(encoding="utf-8")) for path in _sources()}
    trees = list(modules.values())
    known = {name: name for name in errors.__all__} | _derived(trees)
    reasons = _reasons(trees, known)
    public = {name: one for tree in trees for name, one in _makers(tree, known).items() if name[0] != "_"}
    messages: dict[str, set[str]] = defaultdict(set)
    for path, tree in modules.items():
        texts = _constants(tree)
        makers = public | _makers(tree, known) | reasons
        inside = {id(node) for one in makers.values() for node in ast.walk(one.made)}
        for name, shown in [*_raised(tree, texts, known, makers, inside), *_checked(path, tree, texts)]:
            if len(WORDS.findall(re.sub(r"<.*?>", "", shown))) > 2:
                messages[name].add(shown.strip())
    return {name: sorted(messages[name]) for name in errors.__all__ if messages[name]}


@dataclass(frozen=True)
class _Maker:
    """What puts a message together: the call of the class, and the names in it that a caller fills in."""

    made: ast.Call
    names: tuple[str, ...]


def _raised(
    tree: ast.Module,
    texts: dict[str, ast.expr],
    known: dict[str, str],
    makers: dict[str, _Maker],
    inside: set[int],
) -> Iterator[tuple[str, str]]:
    """Class and message of each error that a module makes, itself or by a function for it."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and id(node) not in inside):
        name = ast.unparse(call.func)
        if name in known:
            yield from ((known[name], _shown(part, texts)) for part in call.args[:2])
        elif name == "Problem" and len(call.args) > 3:
            code, message, hint = (_shown(part, texts) for part in call.args[1:4])
            yield "ServiceError", f"{code}: {message}; {hint}"
        elif (maker := makers.get(name.rpartition(".")[2])) is not None:
            given = dict(zip(maker.names, call.args, strict=False))
            yield known[ast.unparse(maker.made.func)], _shown(maker.made.args[0], texts | given)


def _checked(path: Path, tree: ast.Module, texts: dict[str, ast.expr]) -> Iterator[tuple[str, str]]:
    """What models refuse, which pydantic adds to the name of the key."""
    if "checkpoint" in path.parts:
        return  # files that do not fit, of which no user has made the keys
    kind = "ServiceError" if path.is_relative_to(ROOT / "service") else "ConfigError"
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        if any("_validator" in ast.unparse(one) for one in function.decorator_list):
            for node in ast.walk(function):
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                    yield kind, _shown(node.exc.args[0], texts)


def _makers(tree: ast.Module, known: dict[str, str]) -> dict[str, _Maker]:
    """Functions of a module that return an error for their caller to raise."""
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.returns is not None and ast.unparse(node.returns) in known
    ]
    found: dict[str, _Maker] = {}
    for function in [*functions, *functions]:  # again for those that call one that comes later
        parameters = tuple(one.arg for one in function.args.args if one.arg != "self")
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call) and node.args):
            inner = found.get(_names(call))
            if inner is not None:
                passed = zip(call.args, inner.names, strict=False)
                renamed = {one.id: name for one, name in passed if isinstance(one, ast.Name)}
                found.setdefault(function.name, _Maker(inner.made, tuple(renamed.get(one, one) for one in parameters)))
            elif _names(call) in known:
                found.setdefault(function.name, _Maker(call, parameters))
    return found


def _reasons(trees: list[ast.Module], known: dict[str, str]) -> dict[str, _Maker]:
    """Errors of a room's own that become a part of a message: `except UnsavableError as error` and a `raise`."""
    found: dict[str, _Maker] = {}
    for tree in trees:
        for handler in (node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.name):
            raised = handler.body[0].exc if isinstance(handler.body[0], ast.Raise) else None
            kind = ast.unparse(handler.type) if handler.type is not None else ""
            if kind in REASONS and isinstance(raised, ast.Call) and _names(raised) in known:
                found.setdefault(kind, _Maker(raised, (str(handler.name),)))
    return found


def _names(call: ast.Call) -> str:
    return ast.unparse(call.func)


def _derived(modules: list[ast.Module]) -> dict[str, str]:
    """Classes of other modules, which have the section of their base."""
    return {
        node.name: ast.unparse(base)
        for tree in modules
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name not in errors.__all__
        for base in node.bases
        if ast.unparse(base) in errors.__all__
    }


def text() -> str:
    """Markdown: a section for each class, first what it means and then its messages."""
    return "\n\n".join(
        f"## Messages of {name}\n\n{_meaning(name)} [What to do](errors.md#{name.lower()}).\n\n"
        + "\n".join(f"- `` {' '.join(message.split())} ``" for message in lines)
        for name, lines in found().items()
    )


def _meaning(name: str) -> str:
    kind: type[CPSRError] = getattr(errors, name)
    return (inspect.getdoc(kind) or "").partition("\n")[0]


def _sources() -> Iterator[Path]:
    # `cpsr/<x>` links to `<x>`: each file is read once, under its own name.
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents):
                yield path


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Texts that a module has given a name."""
    return {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value, ast.Constant | ast.JoinedStr)
    }


def _shown(node: ast.expr, texts: dict[str, ast.expr]) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_shown(part, texts) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _shown(node.value, texts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _shown(node.left, texts) + _shown(node.right, texts)
    if isinstance(node, ast.IfExp):
        return f"{_shown(node.body, texts)}/{_shown(node.orelse, texts)}"
    if isinstance(node, ast.BoolOp):
        return "/".join(_shown(one, texts) for one in node.values)
    if isinstance(node, ast.Name) and node.id in texts:
        return _shown(texts[node.id], {name: value for name, value in texts.items() if name != node.id})
    names = re.findall(r"[A-Za-z][A-Za-z_]*", re.sub(r"'[^']*'", "", ast.unparse(node)))
    return f"<{(names or ['...'])[-1].replace('_', ' ').strip()}>"
