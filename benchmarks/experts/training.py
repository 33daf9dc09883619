"""One rank of a real training with experts, under DeepSpeed."""

import math
from collections.abc import Callable
from typing import Any

import deepspeed
import numpy
import torch
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from numpy.typing import NDArray

from cpsr.benchmarks.experts.data import CHUNK_WINDOWS, Data
from cpsr.benchmarks.experts.model import MixtureGPT
from cpsr.benchmarks.experts.tasks import Mixture
from cpsr.benchmarks.recovery.task import SEED_STRIDE, VALIDATION_CHUNKS
from cpsr.engines import adapt
from cpsr.engines.moe.layers import ExpertLayer
from cpsr.engines.moe.operators import Expert
from cpsr.engines.moe.token_counts import Counted
from cpsr.state.shard import Shard

__all__ = ["Training", "engine_of", "learning_rate"]

PEAK_LEARNING_RATE, WARM_UP_ITERATIONS, SCHEDULE_ITERATIONS = 1e-3, 50, 3000  # as of the dense model of this size
WEIGHT_DECAY, MAX_GRADIENT_NORM = 0.01, 1.0
EVALUATION_SEED = 0  # gates draw at random: alike whenever they evaluate


class Training:
    """A model, its optimizer and its batches, at ZeRO 0; everything it does is determined by its state.

    Args:
        mixture: shape of the model.
        seed: of the initial weights and the batches.

    Attributes:
        adapter: of the engine.
        operators: whose parameters this rank has.
        parameter_bytes: of each of these parameters, with its moments.
        layers: of experts.
        non_expert_bytes: of all that every token passes, and of gates.
        tokens_per_layer: that an iteration routes in each layer, over all ranks.
    """

    def __init__(self, mixture: Mixture, seed: int) -> None:
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        torch.manual_seed(seed)
        model = MixtureGPT(mixture, rank % mixture.expert_parallel, seed)
        self._engine = engine_of(model, mixture.batch_windows // ranks)
        self._seed = seed
        self._data = Data(mixture, rank, ranks)
        self.adapter = adapt(self._engine)
        operators, counts = self.adapter.expert_operators(), self.adapter.token_counts()
        assert operators is not None  # it has layers of experts
        assert counts is not None
        self.operators, self._counts = operators, counts
        self.parameter_bytes = {
            name: Shard({name: one}).state_bytes for name, one in self.adapter.shard().operators.items()
        }
        self.layers: tuple[ExpertLayer, ...] = operators.layers(self.parameter_bytes)
        sums = operators.bytes_of(self.parameter_bytes)
        self.non_expert_bytes = sum(size for operator, size in sums.items() if not isinstance(operator, Expert))
        self.tokens_per_layer = mixture.batch_windows * mixture.gpt.context * mixture.experts_per_token

    @property
    def iteration(self) -> int:
        """Updates so far."""
        return self.adapter.iteration

    def step(self, before_update: Callable[[], object] | None = None) -> None:
        """Train one iteration.

        Args:
            before_update: called when the gradients are there and the state has not changed yet.
        """
        at = self.iteration
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate(at)
        torch.manual_seed(self._seed * SEED_STRIDE + at)  # gates draw at random
        self._counts.begin_forward()
        loss = self._engine(self._data.batch(self._seed, at))
        self._engine.backward(loss)
        if before_update is not None:
            before_update()
        self._engine.step()
        self._counts.end_iteration(at + 1, applied=True)

    def routed(self) -> list[Counted]:
        """Tokens of the iterations since the last call; a collective."""
        return self._counts.take()

    def forget_routed(self) -> None:
        """The weights went back: what was routed since the last call is trained on again."""
        self._counts.forget()

    def validate(self) -> NDArray[numpy.float64]:
        """Loss of each validation chunk in nats, `(VALIDATION_CHUNKS,)`, on every rank; a collective."""
        with self.adapter.evaluation():
            torch.manual_seed(EVALUATION_SEED)
            losses = self._engine.module.gpt.losses(self._data.validation)
        own = losses.view(-1, CHUNK_WINDOWS).mean(1).double()
        every = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(every, own)
        found: NDArray[numpy.float64] = torch.cat(every).numpy()
        assert found.shape == (VALIDATION_CHUNKS,)
        return found


def learning_rate(iteration: int) -> float:
    """Of the update that takes the run from `iteration` to the next: warm-up, then half a cosine."""
    warmed = PEAK_LEARNING_RATE * min(1.0, (iteration + 1) / WARM_UP_ITERATIONS)
    return warmed * 0.5 * (1.0 + math.cos(math.pi * min(1.0, iteration / SCHEDULE_ITERATIONS)))


def engine_of(model: MixtureGPT, micro_batch: int) -> Any:
    """DeepSpeed at ZeRO 0 with AdamW, for so many windows a rank."""
    group = {"params": list(model.parameters()), "name": "all"}
    parameters = split_params_into_different_moe_groups_for_optimizer(group)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(parameters, lr=PEAK_LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True),
        config={
            "train_micro_batch_size_per_gpu": micro_batch,
            "zero_optimization": {"stage": 0},
            "gradient_clipping": MAX_GRADIENT_NORM,
            "steps_per_print": 10**9,
        },
    )
    return engine
