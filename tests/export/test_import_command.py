"""Jobs come with a checkpoint that DeepSpeed or torch wrote without CPSR, and go with an export."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cpsr.export.command import run_export
from cpsr.export.import_command import run_import
from tests.recovery.job import Job

WORKER = "tests.export.import_worker"
SAVED = 3
ENGINES: dict[str, tuple[int | str, str]] = {
    "zero 1": (1, "fp32"),
    "zero 2": (2, "fp32"),
    "zero 3": (3, "fp32"),
    "zero 2 bf16": (2, "bf16"),
    "zero 1 fp16": (1, "fp16"),
    "fsdp2": ("fsdp2", "fp32"),
}
# On three ranks other stages of ZeRO take them.
ON_THREE: dict[tuple[int | str, str], tuple[int | str, str]] = {(2, "bf16"): (1, "bf16"), (1, "fp16"): (2, "fp16")}
# Runs of CPSR, and what is exported of each and imported again.
RUNS: dict[str, tuple[tuple[int | str, str], tuple[str, ...]]] = {
    "run": (("fsdp2", "fp32"), ("dcp",)),
    "run zero 1": ((1, "bf16"), ("universal", "dcp")),
    "run zero 2": ((2, "fp32"), ("universal",)),
}


@dataclass(frozen=True)
class Found:
    """What the jobs found, by their names: without CPSR, and with it on 2, 3 and 1 ranks."""

    loaded: Mapping[str, Any]
    imported: Mapping[int, Mapping[str, Any]]
    messages: Mapping[str, list[str]]


def launch(directory: Path, ranks: int, files: Path, jobs: Mapping[str, tuple[int | str, str, str]]) -> Any:
    ended = Job(directory).launch(worker=WORKER, ranks=ranks, jobs=dict(jobs), files=files)
    assert set(ended.statuses) == {0}, ended.output[0][-3000:]
    return ended.result()


def imported_from(name: str) -> list[str]:
    if name in RUNS:
        return [f"{name} as {form}" for form in RUNS[name][1]]
    return [name, f"{name} flat"] if name == "fsdp2" else [name, f"{name} universal"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    directory = tmp_path_factory.mktemp("jobs")
    files = directory / "files"
    saved = {name: (*engine, "save") for name, engine in ENGINES.items()}
    saved |= {name: (*engine, "cpsr") for name, (engine, _) in RUNS.items()}
    loaded = launch(directory / "saving", 2, files, saved)
    for form in ("export", "export flat"):
        run_export(files / "run", files / form, "dcp", "fp32", None)
    for name, (_, forms) in RUNS.items():
        for form in forms:
            run_export(files / name, files / f"{name} as {form}", form, "fp32", None)
    messages = {}
    engines = ENGINES | {name: engine for name, (engine, _) in RUNS.items()}
    sources = {one: engine for name, engine in engines.items() for one in imported_from(name)}
    for one in sources:
        messages[one] = run_import(files / one, directory / "1" / one, None)
    imported = {}
    for ranks in (2, 3, 1):
        shutil.copytree(directory / "1", directory / f"runs-{ranks}")
        jobs: dict[str, Any] = {
            one: (*(ON_THREE.get(engine, engine) if ranks == 3 else engine), "cpsr")
            for one, engine in sources.items()
            if ranks > 1 or engine[0] == "fsdp2"
        }
        live = list(jobs)
        if ranks < 3:
            for form in ("export", "export flat"):
                jobs[form] = ("fsdp2", "fp32", "load")
                shutil.copytree(files / form, directory / f"runs-{ranks}" / form)
        imported[ranks] = launch(directory / f"lives-{ranks}", ranks, directory / f"runs-{ranks}", jobs)
        for one in live:
            identity = json.loads((directory / f"runs-{ranks}" / one / "run.json").read_text())
            assert (identity["world_size"], identity["imported"]["begun"]) == (ranks, True)
    return Found(loaded, imported, messages)


NAMES = [(name, one) for name in [*ENGINES, *RUNS] for one in imported_from(name)]


@pytest.mark.parametrize(("name", "source"), NAMES)
def test_an_imported_job_goes_on_as_with_its_own_load(found: Found, name: str, source: str) -> None:
    assert found.imported[2][source] == found.loaded[name] | {"began": SAVED}
    assert f"iteration {SAVED}" in found.messages[source][0]


@pytest.mark.parametrize(
    ("ranks", "name", "source"),
    [(3, *pair) for pair in NAMES] + [(1, *pair) for pair in NAMES if pair[0] in ("fsdp2", "run")],
)
def test_on_other_numbers_of_ranks_but_for_rounding(found: Found, name: str, source: str, ranks: int) -> None:
    other, own = dict(found.imported[ranks][source]), {**found.loaded[name], "began": SAVED}
    precise = name not in ("zero 2 bf16", "zero 1 fp16", "run zero 1")
    assert other.pop("losses") == pytest.approx(own.pop("losses"), rel=1e-5 if precise else 1e-2)
    assert other == own


@pytest.mark.parametrize("form", ["export", "export flat"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_plain_torch_goes_on_from_an_export(found: Found, form: str, ranks: int) -> None:
    assert found.imported[ranks][form]["losses"] == found.loaded["run"]["losses"]
    assert found.imported[ranks][form]["rates"] == found.loaded["run"]["rates"]
