"""What older versions of torch in the supported range lack."""

import torch

__all__ = ["no_cpu_sharding", "no_muon"]


def no_muon() -> str:
    """Why this torch has no optimizer Muon; empty where it has."""
    return "" if hasattr(torch.optim, "Muon") else f"torch {torch.__version__} has no Muon"


def no_cpu_sharding() -> str:
    """Why this torch cannot train with FSDP2 on a processor; empty where it can.

    Torch 2.6 calls `record_event` on the stream of the device, and its stream of the CPU has none.
    """
    if hasattr(torch.cpu.Stream, "record_event"):
        return ""
    return f"torch {torch.__version__} has no FSDP2 on processors"
