from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpsr.service.app import create_app
from cpsr.service.problems import Problem
from cpsr.service.runs import Runs
from tests.service.conftest import BASE_URL
from tests.service.journals import error_of, new_run


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs in a directory, and around them what must not be found."""
    root = tmp_path_factory.mktemp("around")
    new_run(root / "outside")
    directory = root / "runs"
    for name in ("a", "b c"):
        new_run(directory / name)
    (directory / "notes").mkdir()
    (directory / "file").touch()
    (directory / "link").symlink_to(root / "outside", target_is_directory=True)
    return directory


def test_a_directory_of_several_runs(several: Path) -> None:
    client = TestClient(create_app(several), base_url=BASE_URL)
    listed = client.get("/runs").json()
    assert ([run["name"] for run in listed["runs"]], listed["total"]) == (["a", "b c"], 2)
    assert listed["runs"][0]["status"] == "ok"
    assert len(client.get("/runs", params={"limit": 1}).json()["runs"]) == 1
    assert error_of(client.get("/plan"), 409)["code"] == "run_needed"
    for name in ("a", "b c"):
        assert client.get("/plan", params={"run": name}).status_code == 200
    for name in ("link", "notes", "file", "..", "../outside", "a/../a", "/etc", "", ".", "a\0", "c"):
        assert error_of(client.get("/plan", params={"run": name}), 404)["code"] == "no_such_run", name


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text() | st.lists(st.sampled_from(["..", ".", "a", "b c", "outside", "/", "\\", "\0", ""])).map("/".join))
def test_no_name_leads_out(several: Path, name: str) -> None:
    runs = Runs(several)
    if name in runs.names():
        assert runs.find(name) == several / name
        return
    with pytest.raises(Problem) as refused:
        runs.find(name)
    assert refused.value.status == 404


def test_one_run_is_found_with_and_without_its_name(tmp_path: Path) -> None:
    run_dir = new_run(tmp_path / "gpt")
    (run_dir / "inner").mkdir()
    runs = Runs(run_dir)
    assert (runs.names(), runs.find(None), runs.find("gpt")) == (["gpt"], run_dir, run_dir)
    with pytest.raises(Problem):
        runs.find("inner")
    only = Runs(tmp_path)
    assert (only.names(), only.find(None), only.find("gpt")) == (["gpt"], run_dir, run_dir)


def test_a_directory_that_is_not_there_yet_is_one_run(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "later")
    assert (runs.names(), runs.find(None)) == (["later"], tmp_path / "later")
    client = TestClient(create_app(tmp_path / "later"), base_url=BASE_URL)
    (summary,) = client.get("/runs").json()["runs"]
    assert (summary["name"], summary["status"], summary["run_id"]) == ("later", "degraded", None)
