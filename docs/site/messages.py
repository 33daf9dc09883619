"""The messages of all errors, read from the source where they are raised."""

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from cpsr import errors
from cpsr.errors import CPSRError

__all__ = ["found", "text"]

ROOT = Path(__file__).parents[2]
FOLDERS = ("cpsr", "predictor", "fitter", "service")
WORDS = re.compile(r"[A-Za-z]{3,}")


@cache
def found() -> dict[str, list[str]]:
    """Messages by the class of `cpsr.errors` whose section explains them; in angle brackets what is filled in."""
    modules = [ast.parse(path.read_text(encoding="utf-8")) for path in _sources()]
    known = {name: name for name in errors.__all__} | _derived(modules)
    messages = defaultdict(set)
    for tree in modules:
        texts = _constants(tree)
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            for part in call.args[:2] if name in known else ():
                message = _shown(part, texts).strip()
                if len(WORDS.findall(re.sub(r"<.*?>", "", message))) > 2:
                    messages[known[name]].add(message)
    return {name: sorted(messages[name]) for name in errors.__all__ if messages[name]}


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
    if isinstance(node, ast.Name) and node.id in texts:
        return _shown(texts[node.id], {name: value for name, value in texts.items() if name != node.id})
    names = re.findall(r"[A-Za-z][A-Za-z_]*", re.sub(r"'[^']*'", "", ast.unparse(node)))
    return f"<{(names or ['...'])[-1].replace('_', ' ')}>"
