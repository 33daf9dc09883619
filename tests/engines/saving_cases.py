"""Which experts a DeepSpeed job saves, and the capacity of those that recover; run by `worker.py` on two ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch

from cpsr.config import ExpertsConfig
from cpsr.engines import adapt
from cpsr.engines.moe.operators import DEEPSPEED, Expert
from cpsr.errors import UnsupportedEngineError
from cpsr.experts.completeness import wrong_experts
from cpsr.experts.routed import RoutedTokens, unit_name
from cpsr.experts.saving import ExpertSaving, trained_experts
from cpsr.qualify.conformance import Recorder, run, seed
from cpsr.qualify.deepspeed_jobs import EXPERTS, DeepSpeedJob, TinyMoE, configuration, initialize
from cpsr.qualify.torch_jobs import BATCH, LENGTH
from cpsr.ranks.group import Group
from tests.engines.mixture_cases import LAYERS, PREFIX

ALL = {unit_name(Expert(layer, index)) for layer in range(len(LAYERS)) for index in range(EXPERTS)}


class Watching(Recorder):
    """Reports the steps as the observer of a run does."""

    def __init__(self, saving: ExpertSaving) -> None:
        super().__init__()
        self._saving = saving

    def on_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._saving.tokens.begin_forward()

    def after_step(self, iteration: int, applied: bool) -> None:
        self._saving.tokens.end_iteration(iteration, applied)


def alike(value: Any) -> Any:
    """The same on both ranks."""
    both: list[Any] = [None, None]
    torch.distributed.all_gather_object(both, value)
    assert both[0] == both[1]
    return value


def saving_job(expert_parallel: int, stage: int, **settings: Any) -> tuple[DeepSpeedJob, ExpertSaving]:
    seed(1)
    job = DeepSpeedJob(initialize(TinyMoE(expert_parallel), configuration(stage, "fp32")))
    adapter, shard, group = job.adapter, job.adapter.shard(), Group()
    tokens = RoutedTokens.of(adapter, shard, group)
    assert tokens is not None
    assert adapter.mixture is not None
    saving = ExpertSaving(tokens, adapter.mixture, shard, ExpertsConfig(**settings), group)
    job.adapter.attach(Watching(saving))
    return job, saving


def a_run(expert_parallel: int, stage: int, policy: str) -> None:
    """Every checkpoint has the experts of both ranks; a failure takes what was routed since each one's own."""
    job, saving = saving_job(expert_parallel, stage, policy=policy, lost_portion_limit=1.0)
    shard, rank = job.adapter.shard(), job.adapter.rank
    assert saving.units == {
        name: unit_name(Expert(LAYERS.index(name.partition(".")[0]), int(name.split(".")[4])))
        for name in shard.operators
        if PREFIX in name
    }
    parameters = ("up.weight", "up.bias", "down.weight", "down.bias")
    assert job.adapter.mixture is not None
    trained = trained_experts(job.adapter.mixture, shard, Group())
    assert trained == {
        f"{layer}.{PREFIX}.{index}.{name}" for layer in LAYERS for index in range(EXPERTS) for name in parameters
    }
    gathered: list[Any] = [None, None]
    pieces = {
        name: (one.parameter.global_shape, one.parameter.offset, one.parameter.numel)
        for name, one in shard.operators.items()
    }
    torch.distributed.all_gather_object(gathered, pieces)
    assert wrong_experts(dict(enumerate(gathered)), {}, DEEPSPEED, trained) is None
    if expert_parallel == 2:
        assert wrong_experts({rank: gathered[rank]}, {}, DEEPSPEED, trained) is not None

    saved_at = dict.fromkeys(ALL, 0)
    for step in range(5):
        run(job, step, 1)
        units = alike(saving.choose(step + 1, whole=step == 0))
        assert units is None or 0 < len(units) < len(ALL)
        saved_at |= dict.fromkeys(ALL if units is None else units, step + 1)
    mine = {unit: saved_at[unit] for unit in saving.units.values()}
    report = alike(saving.restored(mine, 5))
    tokens = 5 * 2 * job.engine.gradient_accumulation_steps() * BATCH * LENGTH
    assert [layer["assigned_tokens"] for layer in report["layers"]] == [tokens, 2 * tokens]
    stale = [sum(saved_at[unit] < 5 for unit in ALL if unit.startswith(f"0000{layer}-")) for layer in range(2)]
    assert [layer["stale_experts"] for layer in report["layers"]] == stale
    assert 0 < report["lost_portion"] < 1
    saving.close()


def capacity_until_made_up() -> None:
    """Stale experts of one layer: its gate takes more until they have made up for what they lost."""
    fraction = 0.5
    job, saving = saving_job(2, 0, policy="sequential", recovering_capacity_fraction=fraction)
    gates = [layer.deepspeed_moe.gate for layer in (job.module.first, job.module.second)]
    run(job, 0, 1)
    saving.choose(1, whole=True)
    saving.restored({unit: 0 for unit in saving.units.values() if unit.startswith("00001")}, 1)
    assert [gate.capacity_factor for gate in gates] == [1.0, 1 + fraction]
    assert [gate.eval_capacity_factor for gate in gates] == [1.0, 1.0]
    # The first iteration was lost, and half of each other one makes up for it: that is about two, by expert.
    factors = []
    for step in range(1, 8):
        run(job, step, 1)
        saving.choose(step + 1, whole=False)
        factors.append(alike(gates[1].capacity_factor))
    assert factors == sorted(factors, reverse=True)
    assert (factors[0], factors[-1]) == (1 + fraction, 1.0)
    assert gates[0].capacity_factor == 1.0
    saving.restored(dict.fromkeys(saving.units.values(), 7), 8)
    saving.close()
    assert [gate.capacity_factor for gate in gates] == [1.0, 1.0]


def groups_of_different_sizes() -> None:
    module = TinyMoE(2)
    module.second = TinyMoE(1).second
    mixture = adapt(initialize(module, configuration(0, "fp32"))).mixture
    assert mixture is not None
    with pytest.raises(UnsupportedEngineError, match=r"'first': 2, 'second': 1.*set experts.policy to none"):
        mixture.operators()


def tokens_are_those_of_all_ranks() -> None:
    """What a failure takes is what both ranks' gates say."""
    job, saving = saving_job(2, 1, policy="sequential")
    routed: list[list[int]] = []
    for layer in (job.module.first, job.module.second):
        layer.deepspeed_moe.register_forward_hook(lambda one, *_: routed.append(one.exp_counts.tolist()))
    run(job, 0, 1)
    both: list[Any] = [None, None]
    torch.distributed.all_gather_object(both, routed)
    sums = numpy.sum([numpy.reshape(one, (-1, len(LAYERS), EXPERTS)) for one in both], (0, 1))
    saving.choose(1, whole=True)
    report = saving.restored({unit_name(Expert(1, 2)): 0} if job.adapter.rank == 1 else {}, 1)
    assert [layer["lost_tokens"] for layer in report["layers"]] == [0, sums[1][2]]
    saving.close()


SAVING: dict[str, Callable[[], Any]] = {
    f"saving-{policy}-ep{expert_parallel}-zero{stage}": partial(a_run, expert_parallel, stage, policy)
    for policy, expert_parallel, stage in [
        ("sequential", 1, 0),
        ("load_aware", 2, 0),
        ("dynamic_k", 2, 1),
        ("moetion", 2, 2),
    ]
}
SAVING |= {
    "saving-tokens": tokens_are_those_of_all_ranks,
    "saving-capacity": capacity_until_made_up,
    "saving-different-groups": groups_of_different_sizes,
}
