from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from cpsr.journal import Journal
from cpsr.service.access import Access
from cpsr.service.app import create_app

BASE_URL = "http://127.0.0.1:8712"


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
