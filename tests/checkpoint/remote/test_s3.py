"""The S3 protocol itself, against a server of it (moto's, of the extra `dev`): skipped where that is not installed."""

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpsr.checkpoint.remote.copies import remove_old, upload, verify
from cpsr.checkpoint.remote.place import open_place
from cpsr.errors import TargetError
from tests.checkpoint.conftest import make_snapshot
from tests.checkpoint.remote.conftest import RUN, commit, committed_at, fetched, new_run, send

pytest.importorskip("moto.server", reason="the S3 server of the tests: pip install 'cpsr[dev]'")
s3fs = pytest.importorskip("s3fs", reason="pip install 'cpsr[s3]'")

ROOT = Path(__file__).parents[3]
START_SECONDS = 30.0
LARGE = (15_000_000,)  # values of an operator: its moments, 120 MB, are sent in parts


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Of a server that runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(number)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", number), 1).close()
                break
            except OSError:
                assert time.monotonic() < deadline, "the server does not start"
                time.sleep(0.1)
        yield number
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def bucket(port: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A new bucket; credentials and address come from the environment, as a user's do."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    name: str = request.node.name.replace("_", "-")[:40].strip("-")
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(name)
    return name


def test_round_trip(tmp_path: Path, bucket: str) -> None:
    place = open_place(f"s3://{bucket}/runs/gpt")
    stores = new_run(tmp_path / "run")
    assert fetched(place, tmp_path / "empty") is None
    for iteration in (10, 20, 30):
        send(place, commit(stores, iteration))
    remove_old(place, RUN, 2)
    assert committed_at(place) == [20, 30]
    assert place.folders() == ["step-0000000020", "step-0000000030"]
    assert verify(place) == []
    assert fetched(place, tmp_path / "new") == 30
    place.write("step-0000000030", "rank-00000.moments.safetensors", b"damaged")
    assert len(verify(place)) == 1
    assert fetched(place, tmp_path / "newer") == 20
    assert committed_at(place) == [20]


def test_a_bucket_that_is_not_there_is_not_created(tmp_path: Path, bucket: str) -> None:
    place = open_place("s3://bucket-mistyped/run")
    with pytest.raises(TargetError, match="s3://bucket-mistyped/run"):
        send(place, commit(new_run(tmp_path / "run"), 10))
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
    assert place.folders() == ["step-0000000010"]
    assert fetched(place, tmp_path / "new") is None
    send(place, directory)
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
    calls = itertools.count()

    def die() -> bool:
        # Before the first two files, after the small one, and then after the first part of the large one.
        if threading.current_thread() is not threading.main_thread() and next(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    place = open_place(url)
    place.stopped = die
    upload(place, directory)


if __name__ == "__main__":
    _copy_and_die(sys.argv[1], Path(sys.argv[2]))
