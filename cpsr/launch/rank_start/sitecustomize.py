"""Python imports this before the script of a rank, so errors before the script imports CPSR are reported, too.

The environment's own `sitecustomize` runs after it. Processes that the rank starts have the `PYTHONPATH` of the user.
The warm process of `cpsr run` waits in here, and its forks go on as ranks.
"""

import os
import sys
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - costs every rank less than pathlib


def _restore_path() -> None:
    """Remove this folder from the variable."""
    kept = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path != _FOLDER]
    if any(kept):
        os.environ["PYTHONPATH"] = os.pathsep.join(kept)
    else:
        os.environ.pop("PYTHONPATH", None)


sys.path[:] = [path for path in sys.path if path != _FOLDER]
_restore_path()
if "CPSR_WARM" in os.environ:
    try:
        from cpsr.launch.warm_process import become_rank

        become_rank()
    except BaseException:  # noqa: BLE001 - Python would go on with the script; the launcher sees this process end
        os._exit(1)
    _restore_path()
else:
    with suppress(ImportError):  # another Python than the launcher's, which `--no-python` allows
        import cpsr  # noqa: F401 - reports what ends this process

_own = PathFinder.find_spec("sitecustomize", sys.path)
if _own is not None and _own.loader is not None:
    _module = module_from_spec(_own)  # kept: what its variables hold lives on
    _own.loader.exec_module(_module)
