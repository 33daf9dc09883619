"""Reads a file against a model, and names the key of whatever does not fit."""

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from cpsr.errors import ConfigError

__all__ = ["read_file", "read_model", "validated"]

Model = TypeVar("Model", bound=BaseModel)
# Low, so that a key with the wrong unit (`interval_seconds`) still finds its neighbour.
SIMILARITY_MIN = 0.3


def read_model(model: type[Model], path: Path) -> Model:
    """Read another description than the configuration, of a job for example, from a YAML or JSON file.

    Args:
        model: what the file describes.
        path: of the file.

    Raises:
        ConfigError: as `CPSRConfig.load`.
    """
    return validated(model, *read_file(path))


def read_file(path: Path) -> tuple[str, Any]:
    """What to call the file in messages, and its content; an empty file is an empty mapping.

    Raises:
        ConfigError: the file is absent, or not readable.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    try:
        data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not valid {'JSON' if path.suffix == '.json' else 'YAML'}: {error}") from error
    return str(path), {} if data is None else data


def validated(model: type[Model], where: str, data: Any) -> Model:
    """The data as the model has it.

    Raises:
        ConfigError: it is no mapping, a key is unknown or absent, or a value does not fit.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}: expected a mapping of keys, found {type(data).__name__}")
    try:
        return model.model_validate(dict(data))
    except ValidationError as error:
        raise ConfigError(f"{where}: " + "; ".join(_explain(model, error))) from error


def _explain(model: type[BaseModel], error: ValidationError) -> Iterator[str]:
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            yield f"unknown key '{key}'{_nearest(model, problem['loc'])}"
        elif problem["type"] == "missing":
            yield f"the key '{key}' is required"
        else:
            yield f"'{key}' = {problem.get('input')!r}: {problem['msg']}"


def _nearest(model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    for part in location[:-1]:
        if isinstance(part, str):  # a number is a place in a list, whose model is known already
            model = _section_of(model.model_fields[part].annotation) or model
    close = difflib.get_close_matches(str(location[-1]), model.model_fields, n=1, cutoff=SIMILARITY_MIN)
    prefix = ".".join([*map(str, location[:-1]), ""])
    if close:
        return f"; did you mean '{prefix}{close[0]}'?"
    return f"; valid keys: {', '.join(sorted(model.model_fields))}"


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The section in a field's type, also where it may be absent or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section_of, get_args(annotation))), None)
