"""For the Python of a stack: the torchvision of PyPI is imported beside a torch for CPUs.

Its compiled operators, which need CUDA, are not loaded there. It registers what two of them return, and so they must be
known. Nothing that loads or changes images calls them: that is Pillow's and torch's work.
"""

from typing import Any

import torch

if torch.version.cuda is None:
    library: Any = torch.library
    operators = library.Library("torchvision", "DEF")  # they are known as long as this lives
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
