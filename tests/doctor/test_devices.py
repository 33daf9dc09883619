"""What torch and the driver say of GPUs."""

from pathlib import Path

import pytest
import torch

from cpsr.doctor.devices import Devices, check_devices, find_devices
from cpsr.doctor.needs import Launched
from tests.device import ON_CUDA

DRIVER = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
    "GCC version:  gcc version 12.2.0\n"
)
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build\n"


def devices(count: int, **others: object) -> Devices:
    fine: Devices = {"problem": None, "torch_cuda": "12.8", "nccl": "2.27.3", "driver": "570.1"}
    names, memory = ["NVIDIA H100 80GB HBM3"] * count, [85_000_000_000] * count
    return {**fine, "names": names, "memory_bytes": memory, "uuids": [str(one) for one in range(count)], **others}


def test_this_machine_is_described(tmp_path: Path) -> None:
    found = find_devices()
    assert bool(found["names"]) == ON_CUDA
    if not ON_CUDA and find_devices(tmp_path / "none")["driver"] is None:
        told = check_devices(find_devices(tmp_path / "none"), Launched())
        assert told.level == "ok"
        assert told.measured.startswith("no GPU, no driver, no NCCL")


def test_a_driver_without_a_torch_that_uses_it_is_a_warning(tmp_path: Path) -> None:
    for text, number in ((DRIVER, "550.54.15"), (OPEN_DRIVER, "570.133.20")):
        (tmp_path / "version").write_text(text)
        assert find_devices(tmp_path / "version")["driver"] == number
    told = check_devices(devices(0, driver="550.54.15", torch_cuda=None, nccl=None), Launched())
    assert told.level == "warning"
    assert "torch is built without CUDA" in told.measured
    told = check_devices(devices(0, nccl=None), Launched())
    assert "built for CUDA 12.8, finds no GPU" in told.measured


def test_gpus_that_torch_cannot_use_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> bool:
        raise RuntimeError("CUDA driver initialization failed,\nyou might not have a CUDA gpu.")

    monkeypatch.setattr(torch.cuda, "is_available", fails)
    told = check_devices(find_devices(), Launched())
    assert told.level == "error"
    assert "initialization failed, you might" in told.measured


def test_gpus_are_counted_against_the_ranks() -> None:
    told = check_devices(devices(8), Launched(16, 8, 2))
    assert told.level == "ok"
    assert told.measured == "8 x NVIDIA H100 80GB HBM3 of 85 GB, driver 570.1, CUDA 12.8, NCCL 2.27.3"
    assert "8 ranks share 4 GPUs" in check_devices(devices(4), Launched(16, 8, 2)).advice
    found = check_devices(devices(1), Launched(16, 8, 2), 8)  # each rank sees one of its own
    assert found.level == "ok"
    assert found.measured.endswith("; the ranks here see 8 GPUs together")
    assert "8 ranks share 7 GPUs" in check_devices(devices(1), Launched(16, 8, 2), 7).advice
    assert "no NCCL" in check_devices(devices(4, nccl=None), Launched()).advice
