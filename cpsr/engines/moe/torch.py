"""How a plain torch model describes its layers of experts."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from cpsr.engines.moe.layers import ExpertParallel
from cpsr.engines.moe.naming import MODULE_LIST, Naming
from cpsr.engines.moe.operators import ModelOperators, operators_of
from cpsr.engines.moe.token_counts import HookedTokenCounts, ProbabilitiesOf, RoutingLayer
from cpsr.engines.naming import plain_name
from cpsr.errors import UnsupportedEngineError

__all__ = ["MixtureOfExperts"]


@dataclass(frozen=True)
class MixtureOfExperts:
    """How to read a module's layers of experts; all ranks train it on a batch of their own.

    A layer is the module that `naming` takes for one, whether or not it knows the gate. What is called after each of
    its forwards must not wait for the device, and covers all experts, including those on other ranks.

    Attributes:
        counts_of: how many of this rank's tokens a layer's last forward routed to each expert: integers, `(experts,)`.
        probabilities_of: given a layer and the arguments of its last forward: each expert's gating probability, summed
            over this rank's tokens, `(experts,)`; only `experts.popularity: soft` needs it.
        naming: how parameter names mark experts and gates.
        expert_parallel: the group of ranks that share the experts, equally many each, whose names then have their
            numbers over all ranks; a group of one where each rank has all of them.
    """

    counts_of: Callable[[torch.nn.Module], torch.Tensor]
    probabilities_of: ProbabilitiesOf | None = None
    naming: Naming = MODULE_LIST
    expert_parallel: ExpertParallel = field(default_factory=ExpertParallel)

    def operators(self, names: list[str]) -> ModelOperators:
        """The operators that these parameters of a module are; see `operators_of`."""
        return operators_of(names, self.naming, self.expert_parallel)

    def token_counts(self, module: torch.nn.Module, names: list[str], probabilities: bool = False) -> HookedTokenCounts:
        """Counts over all ranks.

        Args:
            module: whose layers are counted.
            names: of its parameters.
            probabilities: sum them, too.

        Raises:
            UnsupportedEngineError: `probabilities_of` is needed and was not given.
        """
        if probabilities and self.probabilities_of is None:
            raise UnsupportedEngineError(
                "experts.popularity = 'soft' sums gating probabilities, and the model does not show them: give "
                "MixtureOfExperts(probabilities_of=...), or choose another popularity"
            )
        modules = {plain_name(name): one for name, one in module.named_modules()}
        operators = self.operators(names)
        layers = operators.layers(dict.fromkeys(names, 1))
        together = torch.distributed.is_available() and torch.distributed.is_initialized()
        return HookedTokenCounts(
            [RoutingLayer(layer.name, modules[layer.name], layer.experts) for layer in layers],
            self.counts_of,
            torch.distributed.group.WORLD if together and torch.distributed.get_world_size() > 1 else None,
            self.probabilities_of if probabilities else None,
        )
