"""The identity of the trained model in a run directory, as far as an export needs it."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from cpsr.errors import CPSRError, RunMismatchError, UnsupportedEngineError

__all__ = ["ModuleIdentity", "RunIdentity", "read_identity"]

_PIPELINE = "PipelineEngine"


class ModuleIdentity(BaseModel):
    """How the module's own state dict differs from what is saved by name.

    Attributes:
        aliases: further name of a tied tensor -> the name under which it is saved.
        transient: buffers that the module keeps out of its state dict.
        frozen: parameter that the optimizer does not move -> its shape, before it was split over ranks.
        strides: trained parameter -> strides, where its elements are not in row-major order.
        extra: entries of the state dict that are neither parameters nor buffers; they are not saved.
    """

    model_config = ConfigDict(frozen=True)

    aliases: dict[str, str]
    transient: list[str]
    frozen: dict[str, tuple[int, ...]]
    strides: dict[str, tuple[int, ...]]
    extra: list[str]


class RunIdentity(BaseModel):
    """`run.json`, as far as it matters here."""

    model_config = ConfigDict(frozen=True)

    run_id: str
    engine: str
    precision: str
    optimizer: str
    module: ModuleIdentity


def read_identity(run_dir: Path) -> RunIdentity:
    """The identity of a run, whose checkpoints can be put together.

    Raises:
        RunMismatchError: `run_dir` is no run directory.
        UnsupportedEngineError: a pipeline.
        CPSRError: `run.json` is damaged, or of a version that did not write what is needed.
    """
    path = run_dir / "run.json"
    try:
        identity = RunIdentity.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise RunMismatchError(f"{run_dir} holds no run.json; name the directory that the run was given") from error
    except (OSError, ValidationError) as error:
        raise CPSRError(
            f"{path} cannot be used ({_first_line(error)}); it is damaged, or of a version that did not write how the "
            "module names its tensors: start the job once with this version, which adds it. Nothing was changed"
        ) from error
    if identity.engine == _PIPELINE:
        raise UnsupportedEngineError(
            f"{run_dir} is a run of a pipeline: its stages' layers and tied modules have a layout of their own in "
            "every format, which this version does not write. Nothing was exported"
        )
    return identity


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error)
