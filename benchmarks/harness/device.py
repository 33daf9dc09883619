"""Timing on a device that computes beside the thread that gives it work."""

import torch

from cpsr.demo.device import CUDA

__all__ = ["wait_for"]


def wait_for(device: str) -> None:
    """Wait until the work that this thread has given the device is done; copies on other streams go on."""
    if device == CUDA:
        torch.cuda.current_stream().synchronize()
