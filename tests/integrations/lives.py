"""Lives of a job that end early, and the examples as processes.

`python -m tests.integrations.lives <example> <log> -- <options> [-- <options>...]`: the example with each of these
options, one after the other, in forks of a process that has imported what it imports, which takes seconds.
"""

import ast
import gc
import itertools
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 300.0  # for what takes seconds


class Stopped(Exception):  # noqa: N818 - a failure of the machine, not an error of the code
    """What ends a life in the middle of the loop."""


def killed_and_back(name: str, folder: Path) -> None:
    """Run an example without a failure, and in two lives in another folder, which end with the same words."""
    lives = (("whole",), ("killed", "--kill-at", "17"), ("killed",))
    options = [word for place, *more in lives for word in ("--", "--folder", str(folder / place), *more)]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.integrations.lives", ROOT / "examples" / name, folder / "log", *options],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    whole, killed, back = ((folder / f"log.{number}").read_text() for number in range(3))
    assert ended.stdout.split() == ["0", str(-signal.SIGKILL), "0"], whole[-2000:] + killed[-2000:] + back[-2000:]
    assert "Training continues at iteration" in back
    assert back.splitlines()[-1] == whole.splitlines()[-1]


def _main(example: Path, log: Path, lives: Sequence[Sequence[str]]) -> None:
    import tests.imported_later  # noqa: F401 - for what it imports

    program = ast.parse(example.read_text())
    program.body = [one for one in program.body if isinstance(one, ast.Import | ast.ImportFrom)]
    exec(compile(program, str(example), "exec"), {})
    gc.freeze()  # at its end no fork looks through all of this
    for number, options in enumerate(lives):
        if not (child := os.fork()):
            for descriptor in (1, 2):
                os.dup2(os.open(f"{log}.{number}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), descriptor)
            sys.argv = [str(example), *options]
            runpy.run_path(str(example), run_name="__main__")
            sys.exit()
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    first, *given = [list(group) for split, group in itertools.groupby(sys.argv[1:], "--".__eq__) if not split]
    _main(Path(first[0]), Path(first[1]), given)
