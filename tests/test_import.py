"""`import cpsr` is cheap and pulls in neither an engine nor a web framework."""

import statistics
import subprocess
import sys

import cpsr

# Beyond torch's own import. A start-up budget that is missed is a wrong import somewhere, not a slow machine: the
# import takes some milliseconds.
LIMIT_SECONDS = 0.3


def run(code: str) -> str:
    return subprocess.check_output([sys.executable, "-c", code], text=True)


def test_imports_neither_deepspeed_nor_fastapi() -> None:
    loaded = run("import cpsr, sys; cpsr.CPSRConfig; print(*sys.modules)").split()
    assert "cpsr.config" in loaded
    assert not {"deepspeed", "fastapi", "torch", "matplotlib"} & set(loaded)
    loaded = run("from cpsr import CPSRRecovery; import sys; print(*sys.modules)").split()
    assert not {"deepspeed", "fastapi", "uvicorn", "matplotlib", "sklearn"} & set(loaded)


def test_costs_little_beyond_torch() -> None:
    code = "import torch, time; t = time.perf_counter(); import cpsr; print(time.perf_counter() - t)"
    assert statistics.median(float(run(code)) for _ in range(3)) < LIMIT_SECONDS


def test_everything_in_all_is_there() -> None:
    for name in cpsr.__all__:
        assert getattr(cpsr, name) is not None
    assert set(dir(cpsr)) == set(cpsr.__all__)
