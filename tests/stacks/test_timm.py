"""timm's pieces in a loop as its train.py has it: killed, it ends with what an undisturbed run saves."""

import os
from pathlib import Path
from typing import Any

import torch

from tests.stacks.environment import stack_python
from tests.stacks.lives import killed_and_back

ON_CPU = Path(__file__).parent / "torchvision_on_cpu"
# Of torchvision the release for this torch; without what it requires, as it would bring PyPI's torch for CUDA.
STACK = ("timm==1.0.31", f"torchvision==0.{int(torch.__version__.split('.')[1]) + 15}.*", "--no-deps")
EPOCHS = 3


def test_a_killed_run_ends_bit_for_bit(tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [str(ON_CPU), os.environ.get("PYTHONPATH")]))
    killed_and_back(stack_python(*STACK), "timm_train.py", tmp_path, PYTHONPATH=path)
    for epoch in range(EPOCHS):
        whole, killed = (saved(tmp_path / run / "timm" / f"checkpoint-{epoch}.pth.tar") for run in ("whole", "killed"))
        assert {"state_dict", "state_dict_ema", "optimizer"} <= whole.keys() == killed.keys()
        assert [name for name, content in whole.items() if content != killed[name]] == []


def saved(checkpoint: Path) -> Any:
    """Weights, their average, moments and rates, as timm has saved them."""
    return bits(torch.load(checkpoint, weights_only=True))


def bits(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.dtype, tree.shape, tree.numpy().tobytes()
    if isinstance(tree, dict):
        return {name: bits(one) for name, one in tree.items()}
    return [bits(one) for one in tree] if isinstance(tree, list) else tree
