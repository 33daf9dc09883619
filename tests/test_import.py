"""`import cpsr` is cheap and pulls in neither an engine nor a web framework."""

import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import cpsr

# Saves in memory and on disk, and predicts; a second life continues.
TRAINING = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from cpsr import CPSRRecovery, TorchAdapter

for life in range(2):
    torch.manual_seed(0)
    module = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(module.parameters())
    config = {"run_dir": "run", "checkpoint": {"interval_iterations": 3}, "planner": {"mtbf_hours": 1}}
    with CPSRRecovery(TorchAdapter(module, optimizer), config) as recovery:
        print(recovery.iteration)
        batches = recovery.resume(DataLoader(TensorDataset(torch.randn(400, 4)), batch_size=4), repeat=True)
        for _ in range(12):
            module(next(batches)[0]).pow(2).mean().backward()
            optimizer.step()
        print(recovery.iteration)
"""

# Beyond torch's own.
EVERY_JOB = {
    *("annotated_types", "cpsr", "numpy", "psutil", "pydantic", "pydantic_core"),
    *("safetensors", "typing_inspection", "xxhash", "yaml"),
}
# Of our own, that `import cpsr.recovery` loads; what plans, predicts, learns or saves experts loads when a job uses it.
LIMIT_MODULES = 180

# Of the processor, beyond torch's own import, which takes some milliseconds: more is a wrong import somewhere.
LIMIT_SECONDS = 0.3


def run(code: str) -> str:
    return subprocess.check_output([sys.executable, "-c", code], text=True)


def test_imports_neither_deepspeed_nor_fastapi() -> None:
    loaded = run("import cpsr, sys; cpsr.CPSRConfig; print(*sys.modules)").split()
    assert "cpsr.config" in loaded
    assert not {"deepspeed", "fastapi", "torch", "matplotlib"} & set(loaded)
    loaded = run("from cpsr import CPSRRecovery; import sys; print(*sys.modules)").split()
    assert not {"deepspeed", "fastapi", "uvicorn", "matplotlib", "sklearn"} & set(loaded)


def test_who_reads_a_journal_does_not_pay_for_torch() -> None:
    for module in ("cpsr.journal", "cpsr.service.app", "cpsr.cli.inspect"):
        loaded = run(f"import {module}, sys; print(*sys.modules)").split()
        assert not {"torch", "deepspeed"} & set(loaded), module


def test_costs_little_beyond_torch() -> None:
    code = "import torch, time; t = time.process_time(); import cpsr; print(time.process_time() - t)"
    assert float(run(code)) < LIMIT_SECONDS


def test_recovery_loads_what_every_job_uses() -> None:
    code = "import torch, sys; found = set(sys.modules); import cpsr.recovery; print(*set(sys.modules) - found)"
    loaded = run(code).split()
    packages = {name.split(".")[0] for name in loaded} - sys.stdlib_module_names
    assert {name for name in packages if "cython" not in name and not name.startswith("_")} <= EVERY_JOB
    assert not {"cpsr.learning", "cpsr.planner.planning", "cpsr.predictor.vitp"} & set(loaded)
    assert sum(name.split(".")[0] == "cpsr" for name in loaded) <= LIMIT_MODULES


SEARCHES = """
import gc, sys, torch, traceback
from cpsr import CPSRRecovery, TorchAdapter
model = torch.nn.Linear(2, 1)
recovery = CPSRRecovery(TorchAdapter(model, torch.optim.SGD(model.parameters(), lr=0.1)), {"run_dir": sys.argv[1]})
found = set()
gc.callbacks.append(lambda *_: found.update(frame.name for frame in traceback.extract_stack()))
gc.set_threshold(1)
recovery.open()
gc.callbacks.clear()
print("open" in found, "open_life" in found, gc.isenabled())
recovery.close()
"""


def test_a_run_opens_without_a_search_for_garbage(tmp_path: Path) -> None:
    said = subprocess.check_output([sys.executable, "-c", SEARCHES, tmp_path / "run"], text=True)
    assert said.split() == ["True", "False", "True"]


def test_everything_in_all_is_there() -> None:
    for name in cpsr.__all__:
        assert getattr(cpsr, name) is not None
    assert set(dir(cpsr)) == set(cpsr.__all__)


# What a user of plain torch may not have: packages that need much disk.
ABSENT = ("deepspeed", "sklearn", "matplotlib", "accelerate", "lightning", "transformers")
OF_THESE = re.compile(r"\.(benchmarks|demo|integrations)\b|deepspeed|\.simulate\.plot|__main__")

BLOCKED = f"import sys; sys.modules.update(dict.fromkeys({ABSENT!r}))"


def test_plain_torch_needs_no_heavy_package() -> None:
    names = [one.name for one in pkgutil.walk_packages(cpsr.__path__, "cpsr.") if not OF_THESE.search(one.name)]
    assert len(names) > 100
    run(f"{BLOCKED}; import importlib; [importlib.import_module(name) for name in {names!r}]")


def test_plain_torch_trains_and_returns_without_them(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{BLOCKED}\n{TRAINING}")
    ended = subprocess.run([sys.executable, script], cwd=tmp_path, text=True, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["0", "12", "12", "24"]
