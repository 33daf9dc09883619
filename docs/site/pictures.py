"""The picture of the dashboard, taken of the service over the journal of a real run.

`docs/pictures/journal.db.gz` is the journal of the killed run of a `cpsr demo` of 2026-11-26. After a change of the
dashboard, with the Chromium of the machine::

    python -m docs.site.pictures
"""

import gzip
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from cpsr.service.access import Access
from cpsr.service.app import create_app
from docs.site.browser import opened_page

__all__ = ["PICTURE", "take"]

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
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    take(PICTURE)
