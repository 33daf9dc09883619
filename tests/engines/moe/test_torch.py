"""Experts of plain torch that ranks share among themselves, on real gloo processes."""

import textwrap
from pathlib import Path

import pytest

from tests.two_ranks import run

SCRIPT = textwrap.dedent(
    """
    import json, sys
    import torch, torch.distributed as dist
    from cpsr.config import ExpertsConfig
    from cpsr.engines.torch import TorchAdapter
    from cpsr.engines.moe.token_counts import MixtureOfExperts
    from cpsr.errors import CPSRError
    from cpsr.experts.saving import ExpertSaving
    from cpsr.engines.moe.operators import ExpertParallel
    from cpsr.ranks.group import Group
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Module()
    model.gate = torch.nn.Linear(2, 4)
    model.experts = torch.nn.ModuleDict({str(number): torch.nn.Linear(2, 2) for number in NUMBERS[rank]})
    mixture = MixtureOfExperts(lambda layer: torch.zeros(4), expert_parallel=ExpertParallel(2, rank))
    adapter = TorchAdapter(model, torch.optim.AdamW(model.parameters()), experts=mixture)
    try:
        saving = ExpertSaving.of(adapter, adapter.shard(), ExpertsConfig(policy="sequential"), Group())
        found = sorted(saving.trained)
    except CPSRError as error:
        found = str(error)
    json.dump(found, open(sys.argv[1] + f".{rank}", "w"))
    dist.destroy_process_group()  # or one exit in some twelve aborts in gloo's threads, without CPSR too
    """
)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ("(0, 1, 2), (3, 4)", "5 experts, which 2 expert-parallel ranks cannot share equally"),
        ("(0, 1), (0, 1)", "experts 0, 1 on rank 1 of 2 expert-parallel ranks"),
        ("(0, 1), (2, 4)", "experts 2, 4 on rank 1 of 2 expert-parallel ranks"),
    ],
)
def test_what_ranks_cannot_share_is_refused_on_both(numbers: str, message: str, tmp_path: Path) -> None:
    first, second = run(f"NUMBERS = [{numbers}]\n{SCRIPT}", tmp_path)
    assert first == second
    assert message in first


def test_names_with_the_numbers_over_all_ranks(tmp_path: Path) -> None:
    first, second = run(f"NUMBERS = [(0, 1), (2, 3)]\n{SCRIPT}", tmp_path)
    expected = [f"experts.{number}.{kind}" for number in range(4) for kind in ("bias", "weight")]
    assert first == second == expected
