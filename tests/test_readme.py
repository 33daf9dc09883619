"""The programs that README and the guides open with, as they are printed, but shorter: a kill, and they come back."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.launch.jobs import Launched

ROOT = Path(__file__).parents[1]
PROGRAM = re.compile(r"```python\n# (\w+\.py)\n(.*?)```", re.DOTALL)
LAUNCH = re.compile(r"^    (cpsr run .*)$", re.MULTILINE)
PASSES = re.compile(r"epochs=\d+")
LINES_MAX = 60
# DeepSpeed would first compile a helper for CPUs, for a minute.
NO_COMPILER = """
import os
if "RANK" in os.environ:
    import deepspeed.ops
    deepspeed.ops.__compatible_ops__ = dict(deepspeed.ops.__compatible_ops__, deepspeed_shm_comm=False)
"""


def launched(page: str, folder: Path) -> Launched:
    """The first program of a page, started by the page's own command."""
    text = (ROOT / page).read_text(encoding="utf-8")
    name, program = PROGRAM.findall(text)[0]
    assert len(program.splitlines()) < LINES_MAX
    (folder / name).write_text(PASSES.sub("epochs=30", program))
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(NO_COMPILER)
    path = os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")])
    return Launched(folder, LAUNCH.findall(text)[0].split(), {"PYTHONPATH": path})


@pytest.mark.parametrize(
    ("page", "killed_at", "last"),
    [
        # 30 passes of 28 batches on each of two ranks, to the end and no further.
        ("README.md", 400, 840),
        pytest.param("docs/start.md", 400, 840, marks=pytest.mark.slow),
        pytest.param("docs/pipelines.md", 300, 600, marks=pytest.mark.slow),
        pytest.param("docs/engines.md", 300, 480, marks=pytest.mark.slow),
    ],
)
def test_the_program_comes_back_from_a_kill(tmp_path: Path, page: str, killed_at: int, last: int) -> None:
    with launched(page, tmp_path) as job:
        job.until(lambda job: f"iteration {killed_at}:" in job.output)
        os.kill(job.pids()[-1], signal.SIGKILL)
        assert job.wait() == 0
        lines, output = job.lines(), job.output
    killed = r"Rank 1 was killed \(SIGKILL\) after iteration (\d+)"
    # A last line tells whether repeated steps were equal, if there were any.
    assert [line.partition(" ")[0] for line in lines[:5]] == ["Started", "Training", "Rank", "Started", "Rank"]
    assert all(line.startswith("Exact, checked over ") for line in lines[5:])
    failed = re.fullmatch(killed + r"\. All ranks start again", lines[2])
    back = re.match(killed + r".* continue at iteration (\d+)[,:] ", lines[4])
    assert failed is not None
    assert back is not None
    # The other rank may have finished the step whose gradients the killed one had still given; its dump shows that.
    assert int(back[1]) - int(failed[1]) in (0, 1)
    # From a checkpoint (the one before, if the newest was still being written), from memory or near the failure.
    assert killed_at - 200 <= int(back[2]) <= int(back[1])
    assert f"checkpoint {last} committed" in output
    assert f"iteration {last + 1}" not in output
