"""The `cpsr` command in this process."""

from pathlib import Path

from typer.testing import CliRunner

from cpsr.cli.main import app


def cpsr(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr
