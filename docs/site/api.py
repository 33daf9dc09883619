"""The pages of the interface: what `__all__` of the documented modules lists."""

from importlib import import_module
from inspect import getdoc

from pydantic import BaseModel
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

from cpsr.engines.adapter import EngineAdapter

__all__ = ["MODULES", "internal", "names", "setup", "text"]

# What a page or an example imports from. Everything else may change without notice: docs/versions.md.
MODULES = (
    "cpsr",
    "cpsr.errors",
    "cpsr.integrations.transformers",
    "cpsr.integrations.accelerate",
    "cpsr.integrations.lightning",
    "cpsr.integrations.fabric",
    "cpsr.hints",
)
HIDDEN = "\0"
BUILT = ("TorchAdapter", "EngineAdapter", "MixtureOfExperts")  # given to CPSR, which calls the rest
INTERFACE = {name for name in dir(EngineAdapter) if name[0] != "_"} | {"operators", "token_counts"}

logger = logging.getLogger(__name__)


def names() -> str:
    """Markdown: a section for each documented module, with what each of its public names is."""
    parts = []
    for module in map(import_module, MODULES):
        rows = [f"| `{name}` | {_purpose(getattr(module, name))} |" for name in module.__all__]
        parts.append("\n".join([f"## {module.__name__}\n", "| name | what it is |", "|---|---|", *rows]))
    return "\n\n".join(parts)


def _purpose(value: object) -> str:
    if not callable(value):
        return f"`{value!r}`"
    return " ".join((getdoc(value) or "").partition("\n\n")[0].split()).replace("|", "\\|")


def text() -> str:
    """Markdown: a section for each documented module, with the docstrings of its public names."""
    parts, seen = [], set()
    for module in map(import_module, MODULES):
        named = {name: getattr(module, name) for name in module.__all__}
        again = [name for name, value in named.items() if id(value) in seen]
        seen |= {id(value) for value in named.values()}
        excluded = f"\n   :exclude-members: {', '.join(again)}" if again else ""
        parts.append(
            f"## {module.__name__}\n\n```{{eval-rst}}\n.. automodule:: {module.__name__}\n   :members:{excluded}\n```"
        )
    return "\n\n".join(parts)


def _sign(app: Sphinx, what: str, name: str, value: object, *_: object) -> tuple[str, str] | None:
    """No arguments where they stand elsewhere: keys in docs/configuration.md, attributes with their types below."""
    told = isinstance(value, type) and (issubclass(value, BaseModel) or value.__name__ == "MixtureOfExperts")
    return ("(...)", "") if what == "class" and told else None


def internal(name: str, value: object) -> bool:
    """Whether a member of a public class is for CPSR alone, or pydantic's."""
    function = value.fget if isinstance(value, property) else value
    owner = getattr(function, "__qualname__", "").partition(".")[0]
    return name == "model_config" or (owner in BUILT and name in INTERFACE)


def _skip(app: Sphinx, what: str, name: str, value: object, *_: object) -> bool | None:
    return True if internal(name, value) else None


def _hide(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Keep Napoleon from taking the words before a colon for the type of a property."""
    if what == "property" and lines:
        lines[0] = lines[0].replace(":", HIDDEN)


def _show(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    lines[:] = [line.replace(HIDDEN, ":") for line in lines]


def _complete(app: Sphinx, environment: BuildEnvironment) -> None:
    """Warn of public names that the site lacks: those without a docstring are left out."""
    listed = {name.rpartition(".")[2] for name in environment.domains["py"].data["objects"]}
    for module in MODULES:
        for name in set(import_module(module).__all__) - listed:
            logger.warning("%s.%s is public, and has no docstring", module, name)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _hide, priority=100)
    app.connect("autodoc-process-docstring", _show, priority=900)
    app.connect("autodoc-process-signature", _sign)
    app.connect("autodoc-skip-member", _skip)
    app.connect("env-check-consistency", _complete)
    return {"parallel_read_safe": True}
