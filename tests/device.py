"""The device that tests train on: `CPSR_TEST_DEVICE` names it, `cpu` by default, or `cuda`.

Importing this module sets the environment of this process, and so of all that it starts: on the CPU they see no GPU,
on CUDA the first of those that were visible. `tests/conftest.py` imports it before anything that imports torch.
"""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

__all__ = ["DEVICE", "NO_STAGES", "ON_CUDA", "VARIABLE", "compute_exactly", "cpu_only", "cuda_only"]

VARIABLE = "CPSR_TEST_DEVICE"
DEVICE = os.environ.get(VARIABLE, "cpu").removesuffix(":0")
ON_CUDA = DEVICE == "cuda"
NO_STAGES = "gloo, over which ranks share a GPU, sends no CUDA tensors from one stage of a pipeline to the next"

if ON_CUDA:
    os.environ["DS_ACCELERATOR"] = "cuda"
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it cuBLAS may add in another order the second time
elif DEVICE == "cpu":
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
else:
    raise ValueError(f"{VARIABLE}={DEVICE}: tests run on cpu or cuda; CUDA_VISIBLE_DEVICES chooses the GPU")


def cuda_only(reason: str) -> "pytest.MarkDecorator":
    """Skip on the CPU."""
    import pytest

    return pytest.mark.skipif(not ON_CUDA, reason=f"{reason} ({VARIABLE}=cuda)")


def cpu_only(reason: str) -> "pytest.MarkDecorator":
    """Skip on CUDA."""
    import pytest

    return pytest.mark.skipif(ON_CUDA, reason=reason)


def compute_exactly() -> None:
    """Let the GPU give the same results twice, bit for bit; called in processes that compare them."""
    if ON_CUDA:
        import torch

        torch.use_deterministic_algorithms(True, warn_only=True)
        # DeepSpeed's buffers are large. mypy does not see this property of a module.
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010
        torch.backends.cudnn.benchmark = False
