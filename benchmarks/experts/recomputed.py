"""What a replica's holder would save by repeating updates from gradients (MOETION, Algorithm 3), on the host."""

import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from cpsr.benchmarks.harness.intervals import median_interval
from cpsr.benchmarks.harness.measurement import Measurement, interval_text
from cpsr.checkpoint.direct_file import hash_pieces
from cpsr.checkpoint.tensor_file import bytes_of

__all__ = ["KERNELS", "measure_updates", "weights_after"]

WIDTH, HIDDEN = 1024, 4096  # of an expert: two matrices of 4.2 million weights each
STATE_BYTES, GRADIENT_BYTES = 12, 4  # of a weight: itself and AdamW's two moments, all fp32
STEPS = 10  # until weights are compared
KERNELS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "one tensor at a time": {"foreach": False}}


def measure_updates(call: Measurement, repeats: int = 15) -> dict[str, Any]:
    """Print and return the seconds of each way with one thread, and how many weights differ between kernels.

    Args:
        call: of the benchmark.
        repeats: of each measurement.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        state = torch.randn(STATE_BYTES // 4 * 2 * WIDTH * HIDDEN)
        gradient = state[: 2 * WIDTH * HIDDEN]
        ways = {f"update by the holder, {name}": _update(kernel) for name, kernel in KERNELS.items()}
        for name, values in (("state", state), ("gradient", gradient)):
            ways[f"copy and hash of the {name}"] = _copy_and_hash(values)
            ways[f"{name} through a socket of this machine"] = partial(_send, values)
        found = {name: median_interval([_seconds(way) for _ in range(repeats)]) for name, way in ways.items()}
        weights = {name: weights_after(kernel) for name, kernel in KERNELS.items()}
    finally:
        torch.set_num_threads(threads)
    differing = {
        name: (one != weights["fused"]).double().mean().item() for name, one in weights.items() if name != "fused"
    }
    rows = [(name, interval_text(one, 1e3, 1)) for name, one in found.items()]
    call.table(f"An expert of {gradient.numel() / 1e6:.1f} million weights, one thread", ("work", "ms"), rows)
    for name, share in differing.items():
        call.console.print(f"After {STEPS} updates {share:.1%} of the weights differ between fused and {name}.")
    return {
        "weights": gradient.numel(),
        "seconds": {name: vars(one) for name, one in found.items()},
        "differ_from_fused": differing,
    }


def weights_after(kernel: dict[str, bool], steps: int = STEPS) -> torch.Tensor:
    """An expert's weights after updates with the same gradients.

    Args:
        kernel: arguments of AdamW that choose it.
        steps: updates.
    """
    optimizer, parameters = _expert(kernel)
    gradients = [torch.randn_like(one) * 1e-3 for one in parameters]
    for step in range(steps):
        for one, values in zip(parameters, gradients, strict=True):
            one.grad = values * (1 + 0.1 * step)
        optimizer.step()
    return torch.cat([one.detach().flatten() for one in parameters])


def _expert(kernel: dict[str, bool]) -> tuple[torch.optim.Optimizer, list[torch.nn.Parameter]]:
    torch.manual_seed(0)
    sizes = (HIDDEN, WIDTH), (WIDTH, HIDDEN)
    parameters = [torch.nn.Parameter(torch.randn(size) * 0.02) for size in sizes]
    return torch.optim.AdamW(parameters, lr=1e-3, **kernel), parameters  # type: ignore[arg-type] # of any kernel


def _update(kernel: dict[str, bool]) -> Callable[[], object]:
    optimizer, parameters = _expert(kernel)
    for one in parameters:
        one.grad = torch.randn_like(one) * 1e-3
    optimizer.step()
    return optimizer.step


def _copy_and_hash(values: torch.Tensor) -> Callable[[], object]:
    target = torch.zeros_like(values)

    def work() -> None:
        target.copy_(values)
        hash_pieces(bytes_of(target).data)

    return work


def _send(values: torch.Tensor) -> None:
    """Send it to another thread, which has it in full when this returns."""
    content = bytes_of(values).data
    taken = memoryview(bytearray(len(content)))
    giver, taker = socket.socketpair()

    def take() -> None:
        left = taken
        while len(left):
            left = left[taker.recv_into(left) :]

    with giver, taker:
        thread = threading.Thread(target=take)
        thread.start()
        giver.sendall(content)
        thread.join()


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
