"""Linear layers without the gradients of their weights: all else is torch's own, bit for bit."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cpsr.engines.deepspeed_repeated import LinearGradients
from cpsr.state.shard import bytes_of
from tests.device import DEVICE

SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=4)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def trained(layer: nn.Linear, values: torch.Tensor, turned: bool) -> tuple[list[Any], list[torch.Tensor]]:
    """Output, gradient of the input, order and strides of the parameters' gradients; and these."""
    order: list[int] = []
    parameters: list[Any] = list(layer.parameters())
    handles = [one.register_post_accumulate_grad_hook(lambda one: order.append(one.dim())) for one in parameters]
    layer.zero_grad()
    values.grad = None
    output = layer(values)
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(output.shape[::-1] if turned else output.shape, generator=generator)
    output.backward((drawn.permute(*reversed(range(drawn.dim()))) if turned else drawn).to(output))
    for handle in handles:
        handle.remove()
    gradients = [one.grad for one in parameters]
    found = [output.detach(), values.grad, order, [(one.stride(), one.dtype) for one in gradients]]
    return found, gradients


@given(SHAPES, st.integers(1, 9), DTYPES, st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_outputs_gradients_of_inputs_and_the_order_are_those_of_torch(
    shape: list[int], width: int, dtype: torch.dtype, bias: bool, turned: bool, needed: bool, permuted: bool
) -> None:
    layer = nn.Linear(shape[-1], width, bias=bias, device=DEVICE, dtype=dtype)
    values = torch.randn(shape, device=DEVICE).to(dtype)
    if permuted and len(shape) > 2:
        values = values.transpose(0, 1).contiguous().transpose(0, 1)
    values.requires_grad_(needed)
    (output, gradient, *rest), usual = trained(layer, values, turned)
    left_out = LinearGradients(layer)
    left_out.leave_out(list(layer.parameters()))
    (output_without, gradient_without, *rest_without), zeros = trained(layer, values, turned)
    assert torch.equal(bytes_of(output), bytes_of(output_without))
    assert (gradient is None) == (gradient_without is None)
    if gradient is not None:
        assert torch.equal(bytes_of(gradient), bytes_of(gradient_without))
        assert gradient.stride() == gradient_without.stride()
    assert rest == rest_without
    if left_out.count:
        assert not any(one.any() for one in zeros)
    else:
        assert all(torch.equal(one, other) for one, other in zip(usual, zeros, strict=True))
        assert values.dim() == 1 or shape[-1] == 1 or values.numel() == shape[-1] or not values.is_contiguous()
    left_out.remove()
    assert "forward" not in vars(layer)


def test_only_chosen_layers_of_the_plain_type_are_left_out() -> None:
    class Other(nn.Linear):
        pass

    layers = [nn.Linear(3, 4), Other(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)]
    plain, other, not_chosen, fixed, half = layers
    model = nn.Sequential(*layers)
    fixed.requires_grad_(False)
    left_out = LinearGradients(model)
    left_out.leave_out([*plain.parameters(), *other.parameters(), *fixed.parameters(), next(half.parameters())])
    torch.autograd.backward(model(torch.randn(5, 3)).sum())
    assert left_out.count == 1
    assert not gradient_of(plain).any()
    assert all(gradient_of(one).any() for one in (other, not_chosen, half))
    assert fixed.weight.grad is None
    left_out.leave_out([])
    torch.autograd.backward(model(torch.randn(5, 3)).sum())
    assert left_out.count == 1
    assert gradient_of(plain).any()


def gradient_of(layer: nn.Linear) -> torch.Tensor:
    assert layer.weight.grad is not None
    return layer.weight.grad


def test_autocast_and_evaluation_are_left_alone() -> None:
    layer = nn.Linear(3, 4)
    left_out = LinearGradients(layer)
    left_out.leave_out(list(layer.parameters()))
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.randn(5, 3)).sum().backward()
    with torch.no_grad():
        layer(torch.randn(5, 3))
    assert left_out.count == 0
    assert gradient_of(layer).any()


def test_a_second_derivative_is_refused_and_not_wrong() -> None:
    layer, values = nn.Linear(3, 1), torch.randn(5, 3, requires_grad=True)
    left_out = LinearGradients(layer)
    left_out.leave_out(list(layer.parameters()))
    (gradient,) = torch.autograd.grad(layer(values).square().sum(), values, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.backward(gradient.sum())
