"""What is served for the dashboard, without a browser."""

import fnmatch
import hashlib
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from cpsr.service.access import Access
from cpsr.service.app import PAGE, create_app
from tests.service.conftest import BASE_URL
from tests.service.journals import error_of, new_run

ROOT = Path(__file__).parents[2]
TOKEN = "c2VjcmV0LXNlY3JldC1zZWNyZXQ="
NAMES = sorted(path.relative_to(PAGE).as_posix() for path in PAGE.rglob("*") if path.is_file())
OWN = [name for name in NAMES if not name.startswith("vendor/")]
TYPES = {"js": "javascript", "css": "text/css", "svg": "image/svg+xml", "html": "text/html"}
IMPORT = re.compile(r"""(?:from|import) "(\./[^"]+)";""")


class Page(HTMLParser):
    """Elements of a page, with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def values(self, *names: str) -> list[str]:
        return [value for _, attributes in self.elements for name in names if (value := attributes.get(name))]


@pytest.fixture(scope="module")
def page() -> Page:
    return Page((PAGE / "index.html").read_text(encoding="utf-8"))


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
    "path",
    [
        "/static/",
        "/static/none.js",
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/..%2fapp.py",
        "/static/vendor",
    ],
)
def test_nothing_else_is_served(client: TestClient, path: str) -> None:
    error_of(client.get(path), 404)


def test_the_page_opens_before_there_is_a_token_and_nothing_else_does(tmp_path: Path) -> None:
    new_run(tmp_path)
    client = TestClient(create_app(tmp_path, Access(TOKEN)), base_url=BASE_URL)
    for path in ("/", "/static/app.js"):
        assert client.get(path).status_code == 200
    for path in ("/plan", "/runs", "/staticplan", "/static", "/openapi.json"):
        error_of(client.get(path, follow_redirects=False), 401)
    assert client.get("/plan", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_under_a_foreign_name_not_even_the_page_opens(client: TestClient) -> None:
    for path in ("/", "/static/app.js"):
        error_of(client.get(path, headers={"host": "evil.example"}), 403)


@pytest.mark.parametrize("name", OWN)
def test_no_file_names_another_place(name: str) -> None:
    text = (PAGE / name).read_text(encoding="utf-8").replace('"http://www.w3.org/2000/svg"', "")
    assert not re.search(r"""\w://|["'(]//\w|url\(|data:\w+/""", text)


def test_the_page_has_no_script_or_style_of_its_own(page: Page) -> None:
    """The policy would forbid them."""
    assert all(attributes.get("src") for tag, attributes in page.elements if tag == "script")
    assert not [tag for tag, attributes in page.elements if tag == "style" or "style" in attributes]
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]


def test_every_file_that_is_named_is_there_and_none_is_idle(page: Page) -> None:
    named = {value.removeprefix("/static/") for value in page.values("src", "href") if value.startswith("/")}
    for name in (name for name in OWN if name.endswith(".js")):
        found = IMPORT.findall((PAGE / name).read_text(encoding="utf-8"))
        named |= {target.removeprefix("./") for target in found}
    assert named | {"index.html", "vendor/README.md", "vendor/uPlot.LICENSE"} == set(NAMES)


def test_the_vendored_files_are_as_they_were_released() -> None:
    readme = (PAGE / "vendor" / "README.md").read_text(encoding="utf-8")
    digests = dict(re.findall(r"\| `([\w.]+)` \| `(\w{64})` \|", readme))
    assert set(digests) == {"uPlot.esm.js", "uPlot.min.css"}
    for name, digest in digests.items():
        assert hashlib.sha256((PAGE / "vendor" / name).read_bytes()).hexdigest() == digest
    assert "MIT" in (PAGE / "vendor" / "uPlot.LICENSE").read_text(encoding="utf-8")


def test_every_file_is_in_the_package() -> None:
    project = ROOT / "pyproject.toml"
    if not project.exists():  # against an installed wheel: what NAMES found there is what is shipped
        assert {"index.html", "vendor/uPlot.LICENSE"} <= set(NAMES)
        return
    patterns = tomllib.loads(project.read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]["cpsr.service"]
    # As setuptools reads them: a star stands for no slash.
    left = {
        name
        for name in NAMES
        if not any(
            pattern.count("/") == f"static/{name}".count("/") and fnmatch.fnmatch(f"static/{name}", pattern)
            for pattern in patterns
        )
    }
    assert left == set()
