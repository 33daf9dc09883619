"""What hooks of a module do lies outside of what torch compiles, however often it compiles anew."""

from typing import Any

import pytest
import torch
from torch import nn

from cpsr.engines.hooks import ModuleHook

CALLS = 20  # with batches of as many sizes: torch stops to compile anew after eight


@pytest.mark.parametrize("what", ["module", "caller", "in place", "nothing"])
def test_nothing_of_a_hook_is_compiled(what: str) -> None:
    seen: list[float] = []
    graphs: list[str] = []

    def act(*given: Any) -> None:
        seen.append(float(torch.ones(3).cosh().sum()))

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    def caller(batch: torch.Tensor) -> Any:
        return module(batch * 2)

    torch.compiler.reset()
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    module.register_forward_pre_hook(ModuleHook(act), prepend=True, with_kwargs=True)
    module.register_forward_hook(ModuleHook(act))
    called: Any = module
    if what == "in place":
        module.compile(backend=backend, dynamic=False)
    elif what == "module":
        called = torch.compile(module, backend=backend, dynamic=False)
    elif what == "caller":
        called = torch.compile(caller, backend=backend, dynamic=False)
    for rows in range(1, 1 + CALLS):
        called(torch.randn(rows, 8)).sum()
    assert len(seen) == 2 * CALLS
    assert bool(graphs) is (what != "nothing")
    assert not any("cosh" in code for code in graphs)
