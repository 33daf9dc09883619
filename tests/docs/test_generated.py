"""The committed pages that are written from the source are what the source gives."""

import pytest

from docs.site.generated import BEGIN, WRITERS, current


@pytest.mark.parametrize("name", WRITERS)
def test_a_generated_page_is_current(name: str) -> None:
    path, page, wanted = current(name)
    assert BEGIN in page
    assert page == wanted, f"{path} is not what the source gives: write it with `make pages`"
