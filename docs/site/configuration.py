"""The reference of the configuration, written from its models."""

import json
import re
from typing import Any

from cpsr.config import CPSRConfig

__all__ = ["text"]

BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
TYPES = {
    "integer": "integer",
    "number": "number",
    "boolean": "true or false",
    "string": "text",
    "null": "null",
    "object": "mapping",
}


def text() -> str:
    """Markdown: a section for each one of the configuration, and its keys in a table."""
    schema = CPSRConfig.model_json_schema()
    properties = schema["properties"]
    sections = {
        name: schema["$defs"][key["$ref"].rpartition("/")[2]] for name, key in properties.items() if "$ref" in key
    }
    keys = {name: key for name, key in properties.items() if name not in sections}
    parts = [f"## Keys outside of any section\n\n{_table(keys)}"]
    for name, section in sections.items():
        purpose = section["description"].partition("\n")[0]
        parts.append(f"## {name}\n\n{_cell(purpose)}\n\n{_table(section['properties'])}")
    return "\n\n".join(parts)


def _table(keys: dict[str, dict[str, Any]]) -> str:
    rows = [
        f"| `{name}` | {_type(key)} | {_default(key)} | {_cell(key['description'])} |" for name, key in keys.items()
    ]
    return "\n".join(["| key | type | default | effect |", "|---|---|---|---|", *rows])


def _type(key: dict[str, Any]) -> str:
    """As a user says it: `integer, at least 1, or null`."""
    if "anyOf" in key:
        return ", or ".join(map(_type, key["anyOf"]))
    if "enum" in key:
        return ", ".join(f"`{value}`" for value in key["enum"])
    if "const" in key:
        return f"`{key['const']}`"
    if key["type"] == "array":
        return f"list, each {_type(key['items'])}"
    bounds = [f"{word} {key[bound]:,}" for bound, word in BOUNDS.items() if bound in key]
    return ", ".join([TYPES[key["type"]], *bounds])


def _default(key: dict[str, Any]) -> str:
    if "default" not in key:
        return "required"
    value = key["default"]
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _cell(words: str) -> str:
    return re.sub(r"docs/(\w+)\.md", r"[\1.md](\1.md)", words.replace("|", "\\|").replace("<", "&lt;"))
