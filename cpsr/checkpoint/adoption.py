"""The first life of an imported run: the job must train the model whose tensors were imported."""

from pathlib import Path
from typing import Any

from cpsr.errors import RunMismatchError

__all__ = ["imported_identity", "is_pending", "require_importable"]

_KEPT = "nothing was changed; build the model that was saved, or use another run_dir"


def imported_identity(run_id: str, source: str, tensors: dict[str, list[int]], outside: list[str]) -> dict[str, Any]:
    """`run.json` of a run that no job has begun yet.

    Args:
        run_id: drawn for the run.
        source: where the state comes from, for people.
        tensors: shapes of everything that was imported, by name.
        outside: names of those that have no optimizer state: buffers, frozen parameters, further names of tied ones.
    """
    unknown = dict.fromkeys(("engine", "precision", "optimizer"), "imported")
    imported = {"source": source, "begun": False, "tensors": tensors, "outside": outside}
    return {"run_id": run_id, "world_size": 1, "tensors": tensors, "zero_stage": None, **unknown, "imported": imported}


def is_pending(known: dict[str, Any]) -> bool:
    """Whether `run.json` is of an imported run of which no job has restored the state."""
    imported = known.get("imported")
    return isinstance(imported, dict) and not imported["begun"]


def require_importable(path: Path, imported: dict[str, Any], description: dict[str, Any], here: dict[str, Any]) -> None:
    """Compare what was imported with the job's model; what the job needs beyond it is checked when it is loaded.

    Args:
        path: the run directory.
        imported: of its `run.json`.
        description: `EngineAdapter.describe()`.
        here: global shapes by name, over all ranks.

    Raises:
        RunMismatchError: another model, or parameters in another order of memory; the first difference is named.
    """
    module, shapes = description["module"], imported["tensors"]
    for name in sorted(shapes):
        now = here.get(module["aliases"].get(name, name))
        if now != shapes[name]:
            ours = f"shape {tuple(now)}" if now is not None else "absent"
            raise RunMismatchError(
                f"{path} was imported from {imported['source']}, of another model: the first tensor that differs is "
                f"{name!r}, shape {tuple(shapes[name])} there and {ours} here; {_KEPT}"
            )
    trained = shapes.keys() - set(imported["outside"])
    frozen = sorted(trained & module["frozen"].keys())
    if frozen:
        raise RunMismatchError(
            f"{path} was imported from {imported['source']}, where {frozen[0]!r} is trained; the optimizer of this "
            f"job does not move it; {_KEPT}"
        )
    turned = sorted(trained & module["strides"].keys())
    if turned:
        raise RunMismatchError(
            f"{path} was imported from {imported['source']}, in row-major order; this job keeps {turned[0]!r} in "
            f"another order of memory (strides {module['strides'][turned[0]]}); {_KEPT}"
        )
