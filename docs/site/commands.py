"""The reference of the command line, written from what `--help` knows."""

from enum import Enum
from typing import Any

import typer

from cpsr.cli.main import app

__all__ = ["text"]


def text() -> str:
    """Markdown: a section for each command, with its arguments and options in a table."""
    return "\n\n".join(_section(f"cpsr {name}", command) for name, command in _commands(typer.main.get_command(app)))


def _commands(group: Any) -> list[tuple[str, Any]]:
    """Commands with their full names, those of groups after the group itself."""
    found = []
    for name, command in group.commands.items():
        found.append((name, command))
        if hasattr(command, "commands"):
            found += [(f"{name} {below}", one) for below, one in _commands(command)]
    return found


def _section(name: str, command: Any) -> str:
    purpose, _, more = (command.help or "").partition("\n\n")
    parts = [f"## {name}", " ".join(purpose.split())]
    if more.strip("\b\n "):
        parts.append(f"```text\n{more.replace(chr(8), '').strip()}\n```")
    rows = [_row(given) for given in command.params if not getattr(given, "hidden", False) and given.name != "help"]
    if rows:
        parts.append("\n".join(["| argument or option | default | effect |", "|---|---|---|", *rows]))
    return "\n\n".join(parts)


def _row(given: Any) -> str:
    names = ", ".join(f"`{name}`" for name in [*given.opts, *given.secondary_opts])
    if given.param_type_name == "argument":
        names = f"`{_cell(given.metavar or given.name.upper())}`"
    default = "required" if given.required else _default(given.default)
    return f"| {names} | {default} | {_cell(given.help or '')} |"


def _default(value: Any) -> str:
    if value in (None, False, (), ""):
        return "-"
    return f"`{value.value if isinstance(value, Enum) else str(value).lower() if value is True else value}`"


def _cell(words: str) -> str:
    return words.replace("|", "\\|")
