"""What is shipped, and that it works where the source tree is not."""

import os
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.packaging.distributions import ROOT, build, copy_tests, install, tracked

# They import most rooms, read a file that the wheel brings, and run whole lives of a job.
SOME = [
    "tests/predictor/test_line.py",
    "tests/recovery/test_faults.py::test_exact_mode_is_bitwise_the_uninterrupted_run",
]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel built from it."""
    folder = tmp_path_factory.mktemp("distributions")
    (sdist,) = build(ROOT, folder / "sdist", "--sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (wheel,) = build(folder / sdist.name.removesuffix(".tar.gz"), folder / "wheel", "--wheel")
    return sdist, wheel


def test_the_wheel_holds_every_room_and_nothing_else(distributions: tuple[Path, Path]) -> None:
    names = {name for name in zipfile.ZipFile(distributions[1]).namelist() if not name.startswith("cpsr-")}
    assert all(name.startswith("cpsr/") for name in names)
    expected = set()
    for folder, inside in (("cpsr", "cpsr"), *((room, f"cpsr/{room}") for room in ("predictor", "fitter", "service"))):
        expected |= {f"{inside}/{path.relative_to(ROOT / folder)}" for path in (ROOT / folder).rglob("*.py")}
    expected |= {
        f"cpsr/benchmarks/{path.relative_to(ROOT / 'benchmarks')}"
        for path in (ROOT / "benchmarks").rglob("*.py")
        if "tests" not in path.parts
    }
    assert {name for name in names if name.endswith(".py")} == expected
    assert {f"cpsr/docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} <= names
    assert {"cpsr/py.typed", "cpsr/service/static/index.html"} <= names
    assert {"cpsr/predictor/prior_table.json", "cpsr/predictor/vitp_weights.safetensors"} <= names


def test_the_installed_wheel_passes_from_another_folder(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    python = install(distributions[1], tmp_path / "environment")
    copy_tests(tmp_path / "elsewhere", [*tracked("tests"), *tracked("docs")])  # some read what a page prints
    # As a user's shell, which knows neither this source tree nor a worker of this pytest.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST_"))}
    where = subprocess.check_output(
        [python, "-c", "import cpsr.predictor.line as m; print(m.__file__)"], text=True, cwd=tmp_path, env=env
    )
    assert str(tmp_path / "environment") in where
    ended = subprocess.run(
        [python, "-m", "pytest", "-m", "not slow", *SOME],
        cwd=tmp_path / "elsewhere",
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-3000:]
    script = tmp_path / "environment" / "lib"
    assert list(script.rglob("cpsr-*.dist-info/entry_points.txt"))
