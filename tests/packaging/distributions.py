"""Build the distributions and make an environment that holds the installed wheel and nothing of the source tree."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

__all__ = ["ROOT", "build", "copy_tests", "install"]

ROOT = Path(__file__).parents[2]
CONFIG = """[pytest]
pythonpath = .
testpaths = tests
addopts = --import-mode=importlib --strict-markers -p no:cacheprovider -q
timeout = 300
markers =
    slow: minutes long
    ranks: starts processes of ranks
"""


def build(source: Path, into: Path, *kinds: str) -> list[Path]:
    """Build `--wheel` and `--sdist` distributions of a source tree; returns the files."""
    command = [sys.executable, "-m", "build", "--no-isolation", *kinds, "--outdir", str(into), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return sorted(into.iterdir())


def install(wheel: Path, environment: Path) -> Path:
    """A fresh environment with this wheel; its dependencies come from the running one. Returns its interpreter."""
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    site = Path(
        subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
    )
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", str(wheel)], check=True)
    # A path file does not run the path files of the folder it names: the editable install there stays out of sight.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def copy_tests(into: Path, tracked: list[str]) -> None:
    """The tests alone, in another folder, with their own configuration."""
    for name in tracked:
        target = into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    (into / "pytest.ini").write_text(CONFIG)


def tracked(*folders: str) -> list[str]:
    """Files of the repository under these folders, without caches."""
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [str(path.relative_to(ROOT)) for path in found if "__pycache__" not in path.parts]
