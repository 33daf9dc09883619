"""The worker of a job whose windows noted norms that are not those of the first time, as a control."""

from collections.abc import Collection, Mapping
from typing import Any

import torch

from cpsr.engines.deepspeed_repeated import DeepSpeedRepeatedSteps
from tests.recovery.worker import Options, main

__all__ = ["Options", "main"]

_repeat = DeepSpeedRepeatedSteps.repeat


def _with_other_norms(steps: DeepSpeedRepeatedSteps, outcome: Mapping[str, Any], without: Collection[str]) -> None:
    other = {name: 4 * one if isinstance(one, torch.Tensor) else one for name, one in outcome.items()}
    _repeat(steps, other, without)


setattr(DeepSpeedRepeatedSteps, "repeat", _with_other_norms)  # noqa: B010 - mypy refuses it otherwise
