"""A kept result is used until the code that decides it changes, and no longer."""

import shutil
from functools import partial
from pathlib import Path

import pytest

from cpsr.benchmarks.recovery import sources
from cpsr.benchmarks.recovery.methods.roster import Method, _source, predictor_source
from cpsr.benchmarks.recovery.sources import BASELINES, PREDICTOR, files_digest, predictor_files
from cpsr.predictor.line import LinePredictor


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the predictors' room, to be changed."""
    copy = tmp_path / "predictor"
    shutil.copytree(PREDICTOR, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(sources, "PREDICTOR", copy)
    return copy


def digest(start: Path) -> str:
    return files_digest(predictor_files(start))


def test_the_line_rests_on_what_it_imports_and_nothing_else(copy: Path) -> None:
    before = digest(copy / "line.py")
    with (copy / "vitp.py").open("a") as file:
        file.write("# changed\n")
    assert digest(copy / "line.py") == before
    with (copy / "obstacles.py").open("a") as file:  # imported by name
        file.write("# changed\n")
    assert digest(copy / "line.py") != before


@pytest.mark.parametrize("name", ["line.json", "constants.bin"])
def test_a_table_beside_a_module_counts_as_its_source(copy: Path, name: str) -> None:
    with (copy / "line.py").open("a") as file:
        file.write("# reads constants.bin\n")
    before = digest(copy / "line.py")
    (copy / "of-nobody.json").write_text("{}")
    assert digest(copy / "line.py") == before
    (copy / name).write_bytes(b"\xff1")
    first = digest(copy / "line.py")
    (copy / name).write_bytes(b"\xff2")
    assert len({before, first, digest(copy / "line.py")}) == 3


def test_settings_are_part_of_the_digest() -> None:
    plain = _source(Method(LinePredictor))
    other = [
        Method(partial(LinePredictor, gain=1.0)),
        Method(LinePredictor, window_checkpoints=6),
        Method(LinePredictor, guarded=True),
    ]
    assert len({plain, *(_source(method) for method in other)}) == 4
    assert predictor_source("line") == _source(other[-1])


def test_a_baseline_rests_on_the_baselines_and_predictors_that_it_imports() -> None:
    names = {path.name for path in predictor_files(BASELINES / "baselines.py")}
    assert {"baselines.py", "autoregression.py", "line.py", "prior_table.json"} <= names
    assert "elementwise.py" not in names


def test_the_product_rests_on_its_pretrained_weights() -> None:
    assert {"prior_table.json", "vitp_weights.safetensors"} <= {
        path.name for path in predictor_files(PREDICTOR / "vitp.py")
    }
