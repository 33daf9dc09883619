"""Pictures of the dashboard, taken of the service over the journal of a real run.

`docs/pictures/journal.db.gz` is the journal of the killed run of a `cpsr demo` of 2026-11-26. After a change of the
dashboard::

    python -m docs.site.pictures

The build takes the picture again for the site where there is a Chromium, and uses the committed one where there is
none.
"""

import gzip
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from sphinx.application import Sphinx
from typer import echo

from cpsr.service.access import Access
from cpsr.service.app import create_app
from docs.site.browser import CHROMIUM, opened_page

__all__ = ["PICTURE", "setup", "take"]

PICTURES = Path(__file__).parents[1] / "pictures"
PICTURE = PICTURES / "dashboard.png"
WAIT_MILLISECONDS = 60_000  # the machine may be busy


def take(path: Path) -> None:
    """Write the picture of the dashboard there, as PNG.

    Raises:
        FileNotFoundError: there is no Chromium here.
        ImportError: playwright is not installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "demo"
        run_dir.mkdir()
        (run_dir / "journal.db").write_bytes(gzip.decompress((PICTURES / "journal.db.gz").read_bytes()))
        with _served(run_dir) as url, opened_page() as page:
            page.set_default_timeout(WAIT_MILLISECONDS)
            page.goto(url)
            page.get_by_text("Fitted at iteration").first.wait_for()
            page.locator("#panels").screenshot(path=path)


@contextmanager
def _served(run_dir: Path) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(run_dir, Access())
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        app.state.streams.closing = True
        server.should_exit = True
        thread.join()


def _replace(app: Sphinx, error: Exception | None) -> None:
    """Take the picture again, in the place of the committed one, at the end of a build."""
    copied = Path(app.outdir) / app.builder.imagedir / PICTURE.name
    if error is None and copied.exists():
        obstacle = _obstacle(copied)
        kept = f"The site has the committed picture of the dashboard: {obstacle}."
        echo(kept if obstacle else "The picture of the dashboard was taken anew.")


def _obstacle(path: Path) -> str:
    """Take the picture; why there is none, which is no reason to have no site."""
    if CHROMIUM is None:
        return "there is no Chromium here"
    try:
        from playwright.sync_api import Error
    except ImportError:
        return "playwright is not installed"
    try:
        take(path)
    except Error as failed:
        return f"Chromium did not take another ({str(failed).splitlines()[0]})"
    return ""


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("build-finished", _replace)
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    take(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE)
