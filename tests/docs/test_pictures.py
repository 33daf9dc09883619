"""The picture of the dashboard is taken where there is a browser, and said to be old where there is none."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from docs.site import pictures
from docs.site.browser import CHROMIUM

PNG = b"\x89PNG"


def at_the_end_of_a_build(folder: Path) -> Path:
    """The picture in a built site, after what the build does last."""
    handlers: list[Any] = []
    pictures.setup(SimpleNamespace(connect=lambda _, handler: handlers.append(handler)))  # type: ignore[arg-type]
    (folder / "_images").mkdir()
    shutil.copy(pictures.PICTURE, folder / "_images")
    handlers[0](SimpleNamespace(outdir=folder, builder=SimpleNamespace(imagedir="_images")), None)
    return folder / "_images" / pictures.PICTURE.name


def test_without_a_browser_the_committed_one_stays_and_the_build_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pictures, "CHROMIUM", None)
    assert at_the_end_of_a_build(tmp_path).read_bytes() == pictures.PICTURE.read_bytes()
    assert "the committed picture" in capsys.readouterr().out


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")
def test_a_browser_that_fails_is_no_reason_to_have_no_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[dev]'")

    def failing(path: Path) -> None:
        raise sync_api.Error("the page crashed\nlong advice")

    monkeypatch.setattr(pictures, "take", failing)
    assert at_the_end_of_a_build(tmp_path).read_bytes() == pictures.PICTURE.read_bytes()
    assert "Chromium did not take another (the page crashed)" in capsys.readouterr().out


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")
def test_with_a_browser_it_is_taken_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[dev]'")
    taken = at_the_end_of_a_build(tmp_path).read_bytes()
    assert taken.startswith(PNG)
    assert taken != pictures.PICTURE.read_bytes()
    assert "taken anew" in capsys.readouterr().out
