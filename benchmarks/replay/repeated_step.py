"""A repeated step of a DeepSpeed engine, where weight gradients of frozen operators are left out, over a whole one."""

import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn
from torch.nn import functional

from cpsr.benchmarks.replay.in_turn import in_turn
from cpsr.demo.device import join_ranks
from cpsr.engines import adapt
from cpsr.errors import CPSRError

__all__ = ["FROZEN", "KINDS", "WHOLE", "repeated_seconds"]

VOCABULARY, WIDTH, LAYERS, EXPERTS, SEQUENCES = 512, 256, 4, 4, 8
SETTLING = 2  # rounds that are not counted
# Name of a model -> experts of each layer, type of the weights, ZeRO stage.
KINDS = {
    "dense, fp32, ZeRO 1": (0, "fp32", 1),
    "dense, bf16, ZeRO 2": (0, "bf16", 2),
    "mixture, fp32, ZeRO 1": (EXPERTS, "fp32", 1),
}
WHOLE = "every gradient"
# Part of the parameters, from the front of the model, whose turn is still to come.
FROZEN = {"the same again": 0.0, "the front half frozen": 0.5, "all frozen": 1.0}


class _Layer(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        wide = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.norm, self.mixed = nn.LayerNorm(WIDTH), experts > 0
        self.wide = MoE(WIDTH, wide, num_experts=experts, k=1, min_capacity=0) if experts else wide

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found = self.wide(self.norm(hidden))
        added: torch.Tensor = found[0] if self.mixed else found
        return hidden + added


class _Model(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.Sequential(*(_Layer(experts) for _ in range(LAYERS)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.layers(self.embed(tokens))).float()
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def repeated_seconds(kind: str, rounds: int, tokens: int) -> dict[str, list[float]]:
    """Seconds of whole steps and of repeated ones, which take turns; in a process of its own, with one thread.

    Raises:
        CPSRError: nothing was left out.
    """
    torch.set_num_threads(1)
    torch.manual_seed(5)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    with tempfile.TemporaryDirectory() as folder:
        join_ranks(f"file://{Path(folder) / 'ranks'}")
        engine = _engine(*KINDS[kind])
        adapter = adapt(engine)
        steps = adapter.repeated_steps()
        if steps is None:
            raise CPSRError(f"{kind}: a replay computes every gradient of this engine")
        names = list(adapter.shard().operators)
        batch = torch.randint(VOCABULARY, (SEQUENCES, tokens // SEQUENCES))
        _step(engine, batch)
        outcome = steps.outcome()

        def step(share: float | None) -> None:
            frozen = names[: round((share or 0.0) * len(names))]
            steps.repeat(None if share is None else outcome, frozen)
            _step(engine, batch)

        kinds = {WHOLE: partial(step, None), **{name: partial(step, share) for name, share in FROZEN.items()}}
        in_turn(kinds, SETTLING, 1, 0)
        found = in_turn(kinds, rounds, 1, 0)
        if steps.left_out == 0:
            raise CPSRError(f"{kind}: no gradient was left out")
        torch.distributed.destroy_process_group()
    return found


def _engine(experts: int, precision: str, stage: int) -> Any:
    model = _Model(experts)
    config = {
        "train_micro_batch_size_per_gpu": SEQUENCES,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        **({} if precision == "fp32" else {precision: {"enabled": True}}),
    }
    groups = split_params_into_different_moe_groups_for_optimizer({"params": [*model.parameters()], "name": "all"})
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-4), config=config)
    return engine


def _step(engine: Any, batch: torch.Tensor) -> None:
    engine.backward(engine(batch))
    engine.step()
