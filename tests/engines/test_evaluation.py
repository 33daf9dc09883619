"""What is taken as a loss, and that an evaluation leaves no trace in the random states."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cpsr.engines.evaluation import loss_of, preserved_training_state
from tests.stand_in_device import stand_in_device

ONE = torch.tensor(2.0)


@pytest.mark.parametrize(
    "output", [ONE, {"loss": ONE}, SimpleNamespace(loss=ONE.reshape(1)), (ONE, torch.ones(3)), [{"loss": ONE}]]
)
def test_a_loss_is_a_tensor_without_dimensions_or_is_named_so(output: Any) -> None:
    found = loss_of(output)
    assert found is not None
    assert found.item() == 2.0


@pytest.mark.parametrize(
    "output",
    [ONE.reshape(1), ONE.reshape(1, 1), (ONE.reshape(1, 1), ONE), torch.tensor(2), {"loss": torch.ones(2)}, {}, None],
)
def test_the_output_for_a_batch_of_one_is_no_loss(output: Any) -> None:
    assert loss_of(output) is None


class OnGPU(torch.nn.Module):
    """Its parameters are on the second GPU."""

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        yield SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1))


def test_the_state_of_the_modules_gpu_is_preserved_and_no_other_asked_for() -> None:
    with stand_in_device(2) as device:
        expected = [state.clone() for state in device.random_states]
        with preserved_training_state(OnGPU()):
            device.random_states[1] = torch.tensor([9], dtype=torch.uint8)
        assert [int(state) for state in device.random_states] == [int(state) for state in expected]
        assert device.trace == [("get_rng_state", None, "cuda:1"), ("set_rng_state", None, "cuda:1")]
