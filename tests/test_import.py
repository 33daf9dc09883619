"""`import cpsr` is cheap and pulls in neither an engine nor a web framework."""

import subprocess
import sys

import cpsr

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
    for module in ("cpsr.journal", "cpsr.service.app", "cpsr.cli.inspect", "cpsr.client"):
        loaded = run(f"import {module}, sys; print(*sys.modules)").split()
        assert not {"torch", "deepspeed"} & set(loaded), module


def test_costs_little_beyond_torch() -> None:
    code = "import torch, time; t = time.process_time(); import cpsr; print(time.process_time() - t)"
    assert float(run(code)) < LIMIT_SECONDS


def test_everything_in_all_is_there() -> None:
    for name in cpsr.__all__:
        assert getattr(cpsr, name) is not None
    assert set(dir(cpsr)) == set(cpsr.__all__)
