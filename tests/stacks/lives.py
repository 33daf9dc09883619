"""An example in the environment of its stack: once without a failure, and once killed and started again."""

import re
import subprocess
from pathlib import Path

from tests.launch.jobs import Launched

__all__ = ["killed_and_back"]

EXAMPLES = Path(__file__).parents[2] / "examples"


def killed_and_back(python: Path, name: str, folder: Path, ranks: int = 1, **environment: str) -> None:
    """Both at once, in `whole` and `killed` of the folder; the killed one says that it has continued exact."""
    script = [str(EXAMPLES / name), "--folder"]
    launcher = [str(python), "-m", "cpsr", "run", f"--nproc-per-node={ranks}", *script]
    alone = launcher if ranks > 1 else [str(python), *script]
    with (
        Launched(folder, [*alone, str(folder / "whole")], environment) as whole,
        Launched(folder, [*launcher, str(folder / "killed"), "--kill-at", "17"], environment) as killed,
    ):
        assert whole.wait() == 0, whole.output[-4000:]
        assert killed.wait() == 0, killed.output[-4000:]
    said = "\n".join(killed.lines())
    assert "was killed (SIGKILL) after iteration 17" in said
    assert re.search(r"continues? at iteration 1\d, exact from", said), said
    assert "Exact, checked over" in said
    for run in ("whole", "killed"):
        status = [str(python), "-m", "cpsr", "status", str(folder / run / "cpsr")]
        assert subprocess.run(status, check=False).returncode == 0
