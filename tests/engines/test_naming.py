import torch
from torch import nn

from cpsr.engines.naming import module_identity


class Odd(nn.Module):
    """Tied parameters and buffers, a buffer outside the state dict, state of its own."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("again", self.mean)
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}


def test_what_a_state_dict_has_beside_or_without_the_saved_names() -> None:
    tensors = {"embed.weight": {"stride": [1, 5]}, "mean": {}}
    identity = module_identity(Odd(), {"scale"}, tensors)
    assert identity == {
        "aliases": {"head.weight": "embed.weight", "again": "mean"},
        "transient": ["scratch"],
        "frozen": {"scale": [2]},
        "strides": {"embed.weight": [1, 5]},
        "extra": ["_extra_state"],
    }


def test_names_of_a_compiled_module_are_those_of_the_module() -> None:
    compiled = torch.compile(Odd())
    assert isinstance(compiled, nn.Module)
    assert module_identity(compiled, {"scale"}, {}) == module_identity(Odd(), {"scale"}, {})
