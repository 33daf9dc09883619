"""Run the test suite against the built wheel, from another folder: `make test-wheel` calls this as a module."""

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.packaging.distributions import ROOT, build, copy_tests, install, tracked

DOCUMENTS = ["ARCHITECTURE.md", "README.md", *tracked("docs"), *tracked("examples")]  # read, or run, by tests
OF_THE_SOURCE_TREE = (
    "tests/docs/",
    "tests/packaging/",
    "tests/test_architecture.py",
    "tests/test_documents.py",
    "tests/test_security.py",
)


def main() -> int:
    """Exit status of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (wheel,) = build(ROOT, work / "dist", "--wheel")
        python = install(wheel, work / "environment")
        names = [name for name in tracked("tests") if not name.startswith(OF_THE_SOURCE_TREE)]
        copy_tests(work / "elsewhere", [*names, *DOCUMENTS])
        return subprocess.run([python, "-m", "pytest", *sys.argv[1:]], cwd=work / "elsewhere", check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
