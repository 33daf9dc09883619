import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from fastapi.testclient import TestClient

from cpsr.journal import Journal
from cpsr.service.access import Access
from cpsr.service.app import create_app

BASE_URL = "http://127.0.0.1:8712"
WAIT_SECONDS = 30.0


class Service:
    """The service in a thread of this process, which can be stopped and started again on its port."""

    def __init__(self, run_dir: Path, access: Access | None = None) -> None:
        self._run_dir, self._access = run_dir, access
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        listener = socket.create_server(("127.0.0.1", self._port))
        self._port = listener.getsockname()[1]
        app = create_app(self._run_dir, self._access)
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]})
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()

    def __enter__(self) -> "Service":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    return TestClient(create_app(tmp_path), raise_server_exceptions=False, base_url=BASE_URL)


@pytest.fixture
def writing(tmp_path: Path) -> TestClient:
    return TestClient(create_app(tmp_path, Access(allow_writes=True)), base_url=BASE_URL)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal.open(tmp_path / "journal.db")
    journal.start_life("predict")
    yield journal
    journal.close()
