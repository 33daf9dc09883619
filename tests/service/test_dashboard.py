"""What is served for the dashboard, without a browser."""

import re
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from cpsr.service.access import Access
from cpsr.service.app import PAGE, create_app
from tests.service.conftest import BASE_URL
from tests.service.journals import error_of, new_run

TOKEN = "c2VjcmV0LXNlY3JldC1zZWNyZXQ="
NAMES = sorted(path.relative_to(PAGE).as_posix() for path in PAGE.rglob("*") if path.is_file())
OWN = [name for name in NAMES if not name.startswith("vendor/")]
TYPES = {"js": "javascript", "css": "text/css", "svg": "image/svg+xml", "html": "text/html"}


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_served_with_its_type(client: TestClient, name: str) -> None:
    response = client.get(f"/static/{name}")
    assert response.status_code == 200
    assert response.content == (PAGE / name).read_bytes()
    suffix = name.rpartition(".")[2]
    # With nosniff a browser runs no module of another type.
    assert TYPES.get(suffix, "") in response.headers["content-type"]
    assert response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/static/icon.svg"])
def test_browsers_may_load_nothing_else(client: TestClient, path: str) -> None:
    policy = client.get(path).headers["content-security-policy"].split("; ")
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert not any("unsafe" in rule for rule in policy)


@pytest.mark.parametrize(
    "path", ["/static/", "/static/none.js", "/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py"]
)
def test_nothing_else_is_served(client: TestClient, path: str) -> None:
    error_of(client.get(path), 404)


def test_the_page_opens_before_there_is_a_token_and_nothing_else_does(tmp_path: Path) -> None:
    new_run(tmp_path)
    client = TestClient(create_app(tmp_path, Access(TOKEN)), base_url=BASE_URL)
    for path in ("/", "/static/app.js"):
        assert client.get(path).status_code == 200
    for path in ("/plan", "/staticplan", "/static", "/openapi.json"):
        error_of(client.get(path, follow_redirects=False), 401)
    assert client.get("/plan", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200


@pytest.mark.parametrize("name", OWN)
def test_no_file_names_another_place(name: str) -> None:
    text = (PAGE / name).read_text(encoding="utf-8").replace('"http://www.w3.org/2000/svg"', "")
    assert not re.search(r"""\w://|["'(]//\w|url\(|data:\w+/""", text)
