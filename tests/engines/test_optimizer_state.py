"""The counts of an optimizer beside its tensors."""

from typing import Any

import torch

from cpsr.engines.optimizer_state import as_new


def test_an_optimizer_as_new_has_taken_no_step_and_keeps_its_settings() -> None:
    rate = torch.tensor(1e-3)
    scalars: dict[str, Any] = {
        "iteration": 12,
        "optimizer_steps": [{"step": 12.0}, {"step": 12}, {}],
        "param_groups": [{"lr": 1e-3, "step": 12}, {"lr": rate}],
    }
    assert as_new(scalars) == {
        "iteration": 12,
        "optimizer_steps": [{"step": 0.0}, {"step": 0}, {}],
        "param_groups": [{"lr": 1e-3, "step": 0}, {"lr": rate}],
    }
    assert scalars["optimizer_steps"][0] == {"step": 12.0}, "what was given is as it was"
