"""The S3 protocol itself, against a server of it: skipped where neither a server (moto) nor s3fs is installed."""

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpsr.checkpoint.remote.catalogue import verify
from cpsr.checkpoint.remote.copier import Copier
from cpsr.checkpoint.remote.place import open_place
from cpsr.checkpoint.remote.upload import retain
from cpsr.config import CheckpointConfig
from cpsr.errors import TargetError
from tests.checkpoint.remote.conftest import RUN, commit, committed_at, fetched, new_run, send

pytest.importorskip("moto", reason="the S3 server of the tests")
s3fs = pytest.importorskip("s3fs", reason="pip install 'cpsr[s3]'")

START_SECONDS = 30.0


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket of a server of its own; credentials and address come from the environment, as a user's do."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < deadline, "the server does not start"
                time.sleep(0.1)
        s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bucket")
        yield "bucket"
    finally:
        server.kill()
        server.wait()


def test_round_trip(tmp_path: Path, bucket: str) -> None:
    place = open_place(f"s3://{bucket}/runs/gpt")
    stores = new_run(tmp_path / "run")
    assert fetched(place, tmp_path / "empty") is None
    for iteration in (10, 20, 30):
        send(place, tmp_path / "run", commit(stores, iteration))
    assert retain(place, RUN, 2) == ["step-0000000010"]
    assert committed_at(place) == [20, 30]
    assert place.folders() == ["step-0000000020", "step-0000000030"]
    assert verify(place) == []
    assert fetched(place, tmp_path / "new") == 30
    place.write("step-0000000030", "rank-00000.moments.safetensors", b"damaged")
    assert len(verify(place)) == 1
    assert fetched(place, tmp_path / "newer") == 20
    assert committed_at(place) == [20]


def test_large_files_go_in_parts_and_the_thread_copies(tmp_path: Path, bucket: str) -> None:
    place = open_place(f"s3://{bucket}/runs/large")
    pieces = [bytes([number]) * (9 << 20) for number in range(5)]  # more than two blocks
    place.make("step-0000000001")
    place.send("step-0000000001", "large", iter(pieces))
    assert b"".join(place.chunks("step-0000000001", "large")) == b"".join(pieces)
    place.remove("step-0000000001", first="COMMIT")
    store = new_run(tmp_path / "run")[0]
    kinds: list[str] = []
    config = CheckpointConfig(target="s3://bucket/runs/large")
    copier = Copier(place, config, store, tmp_path / "run", lambda kind, *_: kinds.append(kind))
    commit([store], 10)
    copier.notify(10)
    copier.close(30.0)
    assert kinds == ["target copied"]
    shutil.rmtree(tmp_path / "run")
    assert fetched(place, tmp_path / "run") == 10


def test_a_bucket_that_is_not_there_is_not_created(tmp_path: Path, bucket: str) -> None:
    place = open_place("s3://bucket-mistyped/run")
    with pytest.raises(TargetError, match="s3://bucket-mistyped/run"):
        send(place, tmp_path / "run", commit(new_run(tmp_path / "run"), 10))
    assert s3fs.S3FileSystem(skip_instance_cache=True).ls("") == [bucket]


def test_a_server_that_is_gone(tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    place = open_place(f"s3://{bucket}/run")
    with pytest.raises(TargetError, match="listing failed"):
        committed_at(place)
