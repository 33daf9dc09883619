"""What an object store alone does: buckets, and files sent in parts (the conformance suite runs there, too)."""

import itertools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from cpsr.checkpoint.remote.copies import upload, verify
from cpsr.checkpoint.remote.place import open_place
from cpsr.errors import TargetError
from tests.checkpoint.conftest import make_snapshot
from tests.checkpoint.remote.conftest import commit, committed_at, copied_run, damage, fetched, folder_of, new_run

s3fs = pytest.importorskip("s3fs", reason="pip install 'cpsr[s3]'")

ROOT = Path(__file__).parents[3]
METHOD = "_call_s3"  # of s3fs, for every request
LARGE = (15_000_000,)  # values of an operator: its moments, 120 MB, are sent in parts


def test_round_trip(tmp_path: Path, bucket: str) -> None:
    place = open_place(f"s3://{bucket}/runs/gpt")
    copied_run(tmp_path / "run", place)
    assert committed_at(place) == [10, 20]
    assert fetched(place, tmp_path / "new") == 20
    damage(place, folder_of(place, 20), "rest")
    assert len(verify(place)) == 1
    assert fetched(place, tmp_path / "newer") == 10


def test_a_bucket_that_is_not_there_is_not_created(tmp_path: Path, bucket: str) -> None:
    place = open_place("s3://bucket-mistyped/run")
    with pytest.raises(TargetError, match="s3://bucket-mistyped/run"):
        upload(place, commit(new_run(tmp_path / "run"), 10))
    assert "bucket-mistyped" not in s3fs.S3FileSystem(skip_instance_cache=True).ls("")


def test_a_process_that_is_killed_in_the_middle_of_parts_leaves_nothing_committed(tmp_path: Path, bucket: str) -> None:
    directory = large_checkpoint(tmp_path / "run")
    place = open_place(f"s3://{bucket}/run")
    command = [sys.executable, "-m", "tests.checkpoint.remote.test_s3", f"s3://{bucket}/run", str(directory)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=200, check=False)
    assert done.returncode == -signal.SIGKILL
    assert parts_left(bucket) != []
    assert committed_at(place) == []
    assert len(place.list()) == 1
    assert fetched(place, tmp_path / "new") is None
    upload(place, directory)
    assert committed_at(place) == [10]
    assert verify(place) == []


def large_checkpoint(run_dir: Path) -> Path:
    """One committed checkpoint whose files are sent in parts."""
    (store,) = new_run(run_dir)
    store.write(make_snapshot(10, sizes=LARGE))
    assert store.commit(10, 60.0, threading.Event()).committed
    return store.directory / "step-0000000010"


def parts_left(bucket: str) -> list[Any]:
    """Uploads in parts that were begun at the server and neither completed nor given up."""
    found = s3fs.S3FileSystem(skip_instance_cache=True).call_s3("list_multipart_uploads", Bucket=bucket)
    return list(found.get("Uploads", []))


def _copy_and_die(url: str, directory: Path) -> None:
    place, calls = open_place(url), itertools.count()
    call_s3 = getattr(place.system, METHOD)

    async def dying(method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "upload_part" and next(calls) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return await call_s3(method, *args, **kwargs)

    setattr(place.system, METHOD, dying)
    upload(place, directory)


if __name__ == "__main__":
    _copy_and_die(sys.argv[1], Path(sys.argv[2]))
