"""The program that README opens with, run as it is printed: a kill, and it comes back."""

import os
import re
import signal
from pathlib import Path

from tests.launch.jobs import Launched

README = Path(__file__).parents[1] / "README.md"
PROGRAM = re.compile(r"```python\n# train\.py\n(.*?)```", re.DOTALL)
LAUNCH = re.compile(r"^    (cpsr run .*)$", re.MULTILINE)
LINES_MAX = 60
# DeepSpeed would first compile a helper for CPUs, for a minute.
NO_COMPILER = """
import os
if "RANK" in os.environ:
    import deepspeed.ops
    deepspeed.ops.__compatible_ops__ = dict(deepspeed.ops.__compatible_ops__, deepspeed_shm_comm=False)
"""


def test_the_program_comes_back_from_a_kill(tmp_path: Path) -> None:
    text = README.read_text(encoding="utf-8")
    program = PROGRAM.findall(text)[0]
    assert len(program.splitlines()) < LINES_MAX
    (tmp_path / "train.py").write_text(program)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(NO_COMPILER)
    path = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    with Launched(tmp_path, LAUNCH.findall(text)[0].split(), {"PYTHONPATH": path}) as launched:
        launched.until(lambda launched: "iteration 400:" in launched.output)
        os.kill(launched.pids()[-1], signal.SIGKILL)
        assert launched.wait() == 0
        lines = launched.lines()
    killed = r"Rank 1 was killed \(SIGKILL\) after iteration (\d+)"
    assert [line.partition(" ")[0] for line in lines] == ["Started", "Training", "Rank", "Started", "Rank"]
    failed = re.fullmatch(killed + r"\. All ranks start again", lines[2])
    back = re.match(killed + r".* continue at iteration (\d+)[,:] ", lines[4])
    assert failed is not None
    assert back is not None
    assert failed[1] == back[1]
    assert 300 <= int(back[2]) <= int(back[1])  # from a checkpoint, from memory or near the failure
    # 30 passes of 28 batches on each of two ranks, to the end and no further.
    assert "iteration 800:" in launched.output
    assert "checkpoint 840 committed" in launched.output
