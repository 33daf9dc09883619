"""Run the whole test suite against the built wheel, from another folder: `make test-wheel` calls this as a module."""

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.packaging.distributions import ROOT, build, copy_tests, install, tracked

DOCUMENTS = ["ARCHITECTURE.md", "README.md", "docs/journal.md"]  # tests hold the code to them


def main() -> int:
    """Exit status of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (wheel,) = build(ROOT, work / "dist", "--wheel")
        python = install(wheel, work / "environment")
        names = [name for name in tracked("tests") if not name.startswith("tests/packaging/")]
        copy_tests(work / "elsewhere", [*names, *DOCUMENTS])
        return subprocess.run([python, "-m", "pytest", *sys.argv[1:]], cwd=work / "elsewhere", check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
