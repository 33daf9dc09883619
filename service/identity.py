"""The identity of a run, from `run.json` in its directory."""

import json
from pathlib import Path
from typing import Any

__all__ = ["identity_of"]

WORLD_SIZE_MAX = 1_000_000  # more than any job has; a damaged run.json must not fill the memory with ranks


def identity_of(run_dir: Path) -> tuple[dict[str, Any], list[str]]:
    """`run_id`, `world_size` and `mode`, as far as they are usable, and what was wrong with the others."""
    path = run_dir / "run.json"
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}, [f"{path} is absent: run_id and world_size are unknown"]
    except (OSError, ValueError) as error:
        return {}, [f"{path} cannot be read: {error}"]
    if not isinstance(data, dict):
        return {}, [f"{path} holds no object: run_id and world_size are unknown"]
    expected: dict[str, type] = {"run_id": str, "world_size": int, "mode": str}
    wrong = [key for key, kind in expected.items() if type(data.get(key)) is not kind]
    if "world_size" not in wrong and not 1 <= data["world_size"] <= WORLD_SIZE_MAX:
        wrong.append("world_size")
    identity = {key: data[key] for key in expected if key not in wrong}
    return identity, [f"{path}: {key!r} is missing or not usable" for key in wrong]
