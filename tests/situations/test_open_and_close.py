"""A script without a `with` block: it opens and closes its run, or ends in another way."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cpsr.journal import JournalReader

# Imports once, and then is one script after the other, each in a fork that ends as Python ends.
SCRIPT = """
import gc
import os
import sys
import tests.imported_later
import torch
from torch.utils.data import DataLoader, TensorDataset
from cpsr import CPSRRecovery, TorchAdapter

gc.freeze()  # at its end no fork looks through all of this
for how, at in [("close", 0), *[(how, at) for how in sys.argv[1:] for at in (13, 0)]]:
    child = os.fork()
    if not child:
        break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with open(f"{how}-{at}.status", "w") as file:
        file.write(str(status))
else:
    os._exit(0)

sys.stdout.flush()
for stream in (sys.stdout, sys.stderr):
    os.dup2(os.open(f"{how}-{at}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream.fileno())
torch.manual_seed(0)
x = torch.randn(160, 8)
loader = DataLoader(TensorDataset(x, x[:, :2]), batch_size=8, shuffle=True)
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
config = {"run_dir": how, "mode": "exact", "checkpoint": {"interval_iterations": 5}}
config["memory"] = {"interval_iterations": 1}
recovery = CPSRRecovery(TorchAdapter(model, optimizer), config)
assert recovery.open() is recovery
print("at", recovery.iteration, flush=True)
for inputs, targets in recovery.resume(loader, epochs=1):
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if recovery.iteration == at:
        if how == "error":
            raise ValueError("the script's own")
        if how == "finally":
            try:
                raise ValueError("the script's own")
            finally:
                recovery.close()
        if how == "forgotten":
            break
else:
    recovery.close()
    recovery.close()
print("weights", sum(value.double().sum().item() for value in model.state_dict().values()), flush=True)
"""

ENDS = {
    "error": (1, "error"),
    "finally": (1, "error"),
    "forgotten": (0, "error"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all scripts have left: each was cut short at iteration 13, and started again."""
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "train.py", *ENDS], cwd=folder, env=environment, timeout=300, check=True)
    return folder


def endings(run_dir: Path) -> list[str]:
    with JournalReader(run_dir / "journal.db") as journal:
        return [life.ending for life in journal.lives()]


def test_a_script_that_closes_its_run_ends_it_in_order(folder: Path) -> None:
    assert (folder / "close-0.status").read_text() == "0"
    assert endings(folder / "close") == ["clean"]


@pytest.mark.parametrize("how", ENDS)
def test_a_script_that_ends_inside_its_loop_goes_on_from_its_newest_snapshot(how: str, folder: Path) -> None:
    status, ending = ENDS[how]
    first, again = (folder / f"{how}-{at}.log" for at in (13, 0))
    assert (folder / f"{how}-13.status").read_text() == str(status), first.read_text()
    assert first.read_text().count("ValueError: the script's own\n") == (how in ("error", "finally"))
    assert (folder / f"{how}-0.status").read_text() == "0", again.read_text()
    assert endings(folder / how) == [ending, "clean"]
    at, weights = [line for line in again.read_text().splitlines() if line.startswith(("at ", "weights "))]
    assert at in ("at 12", "at 13")  # the snapshot of the last step may not have begun
    assert weights == (folder / "close-0.log").read_text().splitlines()[-1]
