"""In which order DistributedDataParallel adds up gradients: the same after a restart as in the run left alone.

In the first backward of a process DDP has all gradients in one bucket, in the order of the parameters. From the second
one on its buckets are in the order in which gradients became ready. With three ranks or more the place of a gradient
decides in which order the ranks' parts of it are added, and so its last bits. A checkpoint therefore keeps the order,
and a restart brings the buckets into it before the first step.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from cpsr.engines.distributed_tensors import is_distributed
from cpsr.engines.hooks import Hooks, StepHooks

__all__ = ["GradientBuckets"]

logger = logging.getLogger(__name__)

COMMUTING_RANKS = 2  # a sum of two is the same in both orders


class GradientBuckets:
    """The order of the gradients in the buckets of one wrapper.

    Args:
        wrapper: DDP around the module; None: there is nothing to be done.
        optimizers: of the loop.
    """

    def __init__(self, wrapper: DistributedDataParallel | None, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        ranks = 0 if wrapper is None else torch.distributed.get_world_size(wrapper.process_group)
        # With unused parameters to be found DDP never rebuilds its buckets.
        matters = wrapper is not None and ranks > COMMUTING_RANKS and not wrapper.find_unused_parameters
        self._wrapper: Any = wrapper if matters else None
        self._optimizers = optimizers
        self._order: list[int] = []  # numbers of parameters
        self._ready: dict[int, None] = {}  # those of the backward that is being watched, oldest first
        self._hooks = Hooks()
        self._of_backward = Hooks()

    def state(self) -> dict[str, str]:
        """The order for a checkpoint; empty where it is not known or does not matter."""
        return {"buckets": " ".join(map(str, self._order))} if self._order else {}

    def load(self, scalars: dict[str, Any]) -> None:
        """Take the order of a checkpoint; `attach` brings the buckets into it."""
        if self._wrapper is not None and "buckets" in scalars:
            self._order = list(map(int, scalars["buckets"].split()))

    def attach(self, iteration: int) -> None:
        """Bring the buckets into the order that was loaded; or learn it in the first step. A collective of DDP's ranks.

        Args:
            iteration: that training goes on from.
        """
        if self._wrapper is None or self._wrapper._has_rebuilt_buckets:
            return
        parameters = self._parameters()
        obstacle = self._obstacle(parameters)
        known = obstacle is None and sorted(self._order) == list(range(len(parameters)))
        agreed = torch.tensor([int(known)], device=parameters[0].device)
        torch.distributed.all_reduce(agreed, torch.distributed.ReduceOp.MIN, group=self._wrapper.process_group)
        if agreed.item():
            self._rebuild(parameters)
            return
        if iteration > 0 and torch.distributed.get_rank() == 0:
            logger.warning(
                "the first step after this restart adds up gradients in another order than the run left alone, and may "
                "differ from it in the last bits: %s. DistributedDataParallel(find_unused_parameters=True) has one "
                "order always",
                obstacle or "the checkpoint does not have the order of DDP's buckets",
            )
        self._order = []
        if obstacle is None:
            self._learn(parameters)

    def detach(self) -> None:
        """Remove every hook."""
        self._of_backward.remove()
        self._hooks.remove()

    def _parameters(self) -> list[torch.nn.Parameter]:
        """Those that DDP reduces, in its order."""
        found, _ = self._wrapper._build_params_for_reducer()
        return list(found)

    def _obstacle(self, parameters: Sequence[torch.nn.Parameter]) -> str | None:
        """Why the buckets cannot be brought into an order; None where they can."""
        wrapper = self._wrapper
        if wrapper.static_graph:
            return "static_graph=True"
        if any(map(is_distributed, parameters)):
            return "parameters are split over ranks"
        if wrapper._comm_hooks:
            return "a communication hook is registered"
        if wrapper.mixed_precision is not None or getattr(wrapper, "_use_python_reducer", False):
            return "DDP's own mixed precision or compiled reducer is in use"
        if any(getattr(module, "sparse", False) for module in wrapper.module.modules()):
            return "gradients are sparse"
        if any(one.grad is not None for one in parameters):
            return "there are gradients already"
        if any(one._post_accumulate_grad_hooks for one in parameters):  # an optimizer would step by zeros
            return "hooks take gradients as soon as they are complete"
        return None

    def _rebuild(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """A backward with gradients of zero, which become ready in the order that was loaded."""
        reducer = self._wrapper.reducer
        with torch.enable_grad():
            total = torch.zeros((), device=parameters[0].device)
            for number in reversed(self._order):  # backward begins with what was computed last
                total = total + parameters[number].sum().to(total) * 0
        reducer.prepare_for_forward()
        reducer.prepare_for_backward([])
        torch.autograd.backward(total)
        for one in parameters:
            one.grad = None
        # As the next forward would; DDP notes it there, and asks no more.
        self._wrapper._has_rebuilt_buckets = bool(reducer._rebuild_buckets())

    def _learn(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Note in which order gradients become ready, until the first update begins."""
        self._ready = {}
        for number, one in enumerate(parameters):

            def note(_: torch.Tensor, number: int = number) -> None:
                self._ready.pop(number, None)  # of an earlier micro-batch
                self._ready[number] = None

            handle = one.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call] # torch's stub
            self._of_backward.add(handle)
        self._hooks.add(StepHooks(self._optimizers[0], lambda *_: self._learned()))

    def _learned(self) -> None:
        if self._of_backward.installed:
            self._of_backward.remove()
            self._order, self._ready = list(self._ready), {}
