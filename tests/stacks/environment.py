"""Environments of the stacks: each has its own packages, and takes torch and cpsr from the environment of the tests."""

import hashlib
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

__all__ = ["stack_python"]

ENVIRONMENTS = Path(__file__).parents[2] / "build" / "stacks"
INSTALL_SECONDS = 600


def stack_python(*requirements: str) -> Path:
    """Interpreter of an environment that holds `requirements`, installed at the first call and kept in `build`.

    What the environment of the tests holds is importable there too, unless a requirement asks for another version.
    """
    key = hashlib.sha256(repr((sys.prefix, requirements)).encode()).hexdigest()[:12]
    name = "".join(letter if letter.isalnum() else "-" for letter in requirements[0])
    environment = ENVIRONMENTS / f"{name}-{key}"
    python = environment / "bin" / "python"
    if (environment / "installed").exists():
        return python
    shutil.rmtree(environment, ignore_errors=True)  # an interrupted installation
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    shared = sysconfig.get_path("purelib")
    own = sysconfig.get_path("purelib", vars={"base": str(environment)})
    # With addsitedir the editable installation of cpsr there is found too; a plain path line would not do that.
    Path(own, "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n", encoding="utf-8")
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install"]
    subprocess.run([*pip, "--quiet", *requirements], check=True, timeout=INSTALL_SECONDS)
    (environment / "installed").touch()
    return python
