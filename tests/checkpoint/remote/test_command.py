"""`cpsr verify <url>` and `cpsr fetch`, as users call them."""

import shutil
from pathlib import Path

from typer.testing import CliRunner, Result

from cpsr.checkpoint.remote.place import open_place
from cpsr.checkpoint.store import CheckpointStore, verify_run
from cpsr.cli.main import app
from tests.checkpoint.remote.conftest import RUN, assert_whole, commit, new_run, send


def cpsr(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def copied(base: Path, world_size: int = 1) -> str:
    """A run in `base/run` and the URL of its target with the copies 10 and 20."""
    url = f"file://{base}/target"
    stores = new_run(base / "run", world_size)
    for iteration in (10, 20):
        send(open_place(url), base / "run", commit(stores, iteration))
    return url


def test_verify_passes_whole_copies_and_names_damage(tmp_path: Path) -> None:
    url = copied(tmp_path)
    done = cpsr("verify", url)
    assert (done.exit_code, done.stdout) == (0, "every committed copy is whole\n")
    file = "checkpoints/step-0000000010/rank-00000.extra.safetensors"
    (tmp_path / "target" / file).write_bytes(b"damaged")
    done = cpsr("verify", url)
    assert done.exit_code == 1
    assert f"{url}/{file} is not what was committed" in done.stdout


def test_verify_of_what_is_no_target(tmp_path: Path) -> None:
    done = cpsr("verify", f"file://{tmp_path}/nothing")
    assert done.exit_code == 2
    assert "nothing is committed" in done.stderr
    assert cpsr("verify", "nosuchsystem://x").exit_code == 2


def test_a_local_target_can_be_verified_as_a_directory_too(tmp_path: Path) -> None:
    copied(tmp_path)
    assert cpsr("verify", tmp_path / "target").exit_code == 0


def test_fetch_all_ranks_into_a_new_directory(tmp_path: Path) -> None:
    url = copied(tmp_path, world_size=2)
    done = cpsr("fetch", url, tmp_path / "new")
    assert (done.exit_code, done.stdout) == (0, f"checkpoint 20 of {url} is in {tmp_path}/new\n")
    assert verify_run(tmp_path / "new") == []
    for rank in range(2):
        assert_whole(CheckpointStore(tmp_path / "new", rank, 2, RUN, 5), 20, rank)
    assert (tmp_path / "new" / "run.json").exists()
    assert "nothing was fetched" in cpsr("fetch", url, tmp_path / "new").stdout


def test_fetch_a_given_iteration_or_the_next_older_whole_one(tmp_path: Path) -> None:
    url = copied(tmp_path)
    assert cpsr("fetch", url, tmp_path / "older", "--iteration", 10).exit_code == 0
    assert_whole(CheckpointStore(tmp_path / "older", 0, 1, RUN, 5), 10)
    (tmp_path / "target" / "checkpoints" / "step-0000000020" / "rank-00000.params.safetensors").write_bytes(b"damaged")
    done = cpsr("fetch", url, tmp_path / "new")
    assert done.exit_code == 0
    assert "rank-00000.params.safetensors is not what was committed" in done.stdout
    assert_whole(CheckpointStore(tmp_path / "new", 0, 1, RUN, 5), 10)
    done = cpsr("fetch", url, tmp_path / "none", "--iteration", 20)
    assert done.exit_code == 2
    assert "does not hold a whole copy of iteration 20" in done.stderr
    assert not (tmp_path / "none" / "run.json").exists()


def test_fetch_refuses_another_runs_directory(tmp_path: Path) -> None:
    url = copied(tmp_path)
    new_run(tmp_path / "other", run_id="ab" * 16)
    done = cpsr("fetch", url, tmp_path / "other")
    assert done.exit_code == 2
    assert "another run" in done.stderr
    shutil.rmtree(tmp_path / "other" / "checkpoints")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["run.json"]
