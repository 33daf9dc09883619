"""The Chromium of the machine, for pictures; the site is built without it as well."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["CHROMIUM", "opened_page"]

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def opened_page(width: int = 1280, height: int = 900) -> Iterator[Any]:
    """An empty page of Chromium, of this size in pixels.

    Raises:
        FileNotFoundError: there is no Chromium here.
        ImportError: playwright is not installed.
    """
    if CHROMIUM is None:
        raise FileNotFoundError("no Chromium is installed: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    # A sandbox is more than root may have.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        try:
            yield browser.new_page(viewport={"width": width, "height": height})
        finally:
            browser.close()
