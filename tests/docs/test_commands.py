"""The reference has every command, and the options that `--help` prints."""

import re
import subprocess
import sys

from docs.site.commands import text


def section(command: str) -> str:
    return text().partition(f"## cpsr {command}\n")[2].partition("\n## ")[0]


def test_every_command_is_there() -> None:
    done = subprocess.run([sys.executable, "-m", "cpsr", "--help"], capture_output=True, text=True, check=True)
    named = set(re.findall(r"^│ (\w+) ", done.stdout.partition("Commands")[2], re.MULTILINE))
    assert len(named) > 10
    assert named <= set(re.findall(r"^## cpsr (\w+)$", text(), re.MULTILINE))
    assert "## cpsr bench recovery\n" in text()


def test_arguments_and_defaults_are_told() -> None:
    assert "| `--port` | `8712` |" in section("serve")
    assert "| `--run-dir` | required |" in section("serve")
    assert "| `DIR|URL`" in section("verify").replace("\\|", "|")
