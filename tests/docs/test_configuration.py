"""The reference has every key of every section."""

import re

from pydantic import BaseModel

from cpsr.config import CPSRConfig
from docs.site.configuration import text

ROW = re.compile(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+) \|$", re.MULTILINE)


def rows(section: str) -> dict[str, tuple[str, str, str]]:
    part = text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    return {name: (kind, default, effect) for name, kind, default, effect in ROW.findall(part)}


def test_every_key_of_every_section_is_there_with_its_description() -> None:
    seen = 0
    for name, field in CPSRConfig.model_fields.items():
        kind = field.annotation
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            assert name in rows("Keys outside of any section")
            continue
        found = rows(name)
        assert found.keys() == kind.model_fields.keys()
        seen += len(found)
    assert seen > 30


def test_types_and_defaults_are_those_of_a_yaml_file() -> None:
    checkpoint = rows("checkpoint")
    assert checkpoint["interval_iterations"][:2] == ("integer, at least 1, or null", "`null`")
    assert checkpoint["shared_memory"][:2] == ("true or false", "`true`")
    assert checkpoint["save_timeout_seconds"][:2] == ("number, above 0", "`600.0`")
    assert rows("Keys outside of any section")["run_dir"][:2] == ("text", "required")


def test_pages_that_a_description_names_are_links() -> None:
    assert "[memory.md](memory.md)" in text()
    assert "docs/" not in text()
