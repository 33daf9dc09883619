"""Which experts a running job saves: plain torch, alone and on two ranks; `tests/engines` has the DeepSpeed cases."""

import json
import logging
import math
import random
import textwrap
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from cpsr import CPSRRecovery
from cpsr.benchmarks.harness.checkpoint_files import steps_in
from cpsr.checkpoint.manifest import step_name
from cpsr.config import ExpertsConfig
from cpsr.engines import TorchAdapter
from cpsr.engines.moe.operators import ModelOperators
from cpsr.engines.moe.token_counts import HookedTokenCounts, MixtureOfExperts, ModuleMixture, RoutingLayer
from cpsr.errors import ConfigError
from cpsr.experts.copy_budget import Lengthening
from cpsr.experts.in_memory import TEN, UNLIKE, Agreed, InMemory
from cpsr.experts.routed import RoutedTokens
from cpsr.experts.saving import ExpertSaving, policy_named
from cpsr.qualify.conformance import Recorder
from cpsr.ranks.group import Group
from cpsr.state.codec import decode, encode
from tests.two_ranks import run

WIDTH = 2
POLICIES = ("sequential", "load_aware", "dynamic_k", "moetion")
# Bytes of an expert: weight and bias in float32, each with two moments.
EXPERT_BYTES = 3 * 4 * (WIDTH * WIDTH + WIDTH)
EXPERTS, BUFFERS = 24, 4
COMPARED = 62  # iterations, until steps beside copies of all were compared with others


class Layer(nn.Module):
    """Experts, a gate that routes by the given numbers, and a shared expert that takes every token."""

    counts: torch.Tensor

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
        """Token by token; `numbers` are of tokens, expert by expert."""
        self.counts = torch.tensor(numbers)
        places = torch.repeat_interleave(torch.arange(len(numbers)), self.counts)
        probabilities = self.gate(hidden).softmax(1)
        routed = [self.experts[int(place)](token) for place, token in zip(places, hidden, strict=True)]
        weights = probabilities[torch.arange(len(places)), places].unsqueeze(1)
        output: torch.Tensor = hidden + self.shared(hidden) + weights * torch.stack(routed)
        return output


class Model(nn.Module):
    """All layers take equally many tokens."""

    def __init__(self, experts: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, experts))

    def forward(self, numbers: Sequence[Sequence[int]]) -> torch.Tensor:
        hidden = torch.ones(sum(numbers[0]), WIDTH)
        for layer, own in zip(self.layers, numbers, strict=True):
            hidden = layer(hidden, own)
        return hidden.square().mean()


def counts_of(layer: nn.Module) -> torch.Tensor:
    assert isinstance(layer, Layer)
    return layer.counts


class Watching(Recorder):
    """Reports the steps as the observer of a run does."""

    def __init__(self, saving: ExpertSaving) -> None:
        super().__init__()
        self._saving = saving

    def on_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._saving.tokens.begin_forward()

    def after_step(self, iteration: int, applied: bool) -> None:
        self._saving.tokens.end_iteration(iteration, applied)


def saving_of(adapter: TorchAdapter, config: ExpertsConfig, group: Group) -> ExpertSaving:
    tokens = RoutedTokens.of(adapter, adapter.shard(), group)
    assert tokens is not None
    assert adapter.mixture is not None
    return ExpertSaving(tokens, adapter.mixture, adapter.shard(), config, group)


class Job:
    """A loop over a model with layers of so many experts, and what chooses among them."""

    def __init__(self, experts: Sequence[int] = (3, 2), frozen: str = "", **settings: Any) -> None:
        self.model = Model(experts)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not frozen or frozen not in name)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained)
        self.adapter = TorchAdapter(self.model, self.optimizer, experts=MixtureOfExperts(counts_of))
        settings.setdefault("policy", "sequential")
        self.saving = saving_of(self.adapter, ExpertsConfig(**settings), Group())
        self.adapter.attach(Watching(self.saving))

    def train(self, *numbers: Sequence[int]) -> int:
        """One step with so many tokens for each expert; gives its iteration."""
        self.optimizer.zero_grad()
        self.model(numbers).backward()
        self.optimizer.step()
        return self.adapter.iteration

    def save(self, *, whole: bool = False) -> list[str] | None:
        """A checkpoint of the present iteration begins."""
        units = self.saving.choose(self.adapter.iteration, whole=whole)
        return None if units is None else sorted(units)

    def saved_after(self, *numbers: Sequence[int]) -> list[str] | None:
        """One more step, and a checkpoint."""
        self.train(*numbers)
        return self.save()


def through_a_checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    data, tensors = encode(state)
    restored: dict[str, Any] = decode(json.loads(json.dumps(data)), tensors)
    return restored


class TestUnits:
    def test_every_parameter_of_an_expert_and_nothing_else(self) -> None:
        """Gates and shared experts are saved with every checkpoint."""
        assert Job((3, 1)).saving.units == {
            f"layers.{layer}.experts.{index}.{kind}": f"{layer:05d}-{index:05d}"
            for layer, experts in enumerate((3, 1))
            for index in range(experts)
            for kind in ("weight", "bias")
        }

    def test_frozen_experts_have_nothing_to_save(self) -> None:
        job = Job((3, 2), frozen="layers.0.experts.1.")
        assert "00000-00001" not in job.saving.units.values()
        assert Job((2, 2), frozen=".experts.").saving.units == {}

    @pytest.mark.parametrize("experts", [None, MixtureOfExperts(counts_of)])
    def test_a_model_without_experts_is_refused(self, tmp_path: Path, experts: MixtureOfExperts | None) -> None:
        module = nn.Linear(2, 2)
        adapter = TorchAdapter(module, torch.optim.AdamW(module.parameters()), experts=experts)
        with pytest.raises(ConfigError, match=r"experts\.policy = 'moetion', and the model has no layers of experts"):
            CPSRRecovery(adapter, {"run_dir": tmp_path, "experts": {"policy": "moetion"}}).__enter__()


class TestChoosing:
    def test_sequential_goes_round(self) -> None:
        job = Job((3, 2))
        assert job.save(whole=True) is None
        chosen = [job.saved_after([2, 1, 1], [2, 2]) for _ in range(6)]
        assert [units[0] for units in chosen if units] == [f"00000-0000{index}" for index in (1, 2, 0, 1, 2, 0)]
        assert [units[1] for units in chosen if units] == [f"00001-0000{index}" for index in (0, 1, 0, 1, 0, 1)]

    def test_load_aware_takes_what_most_is_at_risk_of(self) -> None:
        job = Job((3, 2), policy="load_aware")
        job.save(whole=True)
        assert job.saved_after([1, 3, 2], [4, 2]) == ["00000-00001", "00001-00000"]
        assert job.saved_after([1, 1, 4], [1, 5]) == ["00000-00002", "00001-00001"]
        assert job.saved_after([3, 2, 1], [2, 4]) == ["00000-00000", "00001-00001"]  # 5, 3, 1 and 3, 4 unsaved

    @pytest.mark.parametrize("policy", POLICIES)
    def test_each_expert_has_its_turn_where_no_token_was_routed(self, policy: str) -> None:
        saving = Job((3, 2), policy=policy).saving
        seen: set[str] = set()
        for iteration in range(1, 7):
            saving.tokens.end_iteration(iteration, applied=True)
            seen.update(saving.choose(iteration, whole=False) or ())
        assert seen == set(saving.units.values())

    @pytest.mark.parametrize("agrees", [False, True])
    def test_snapshots_in_memory_change_no_checkpoint(self, agrees: bool) -> None:
        """4 + 8 of 32 tokens are at risk with two experts, since a prediction may lose those of an interval, too."""
        job = Job((4,), policy="dynamic_k", lost_portion_limit=0.4)
        for _ in range(6):
            job.train([1, 1, 1, 1])
        job.save(whole=True)
        job.train([1, 1, 1, 1])
        if agrees:
            job.saving.agree_in_memory()
        assert len(job.saved_after([1, 1, 1, 1]) or ()) == 2
        assert job.saving.tokens.local().tolist() == [8, 8, 8, 8]


class Stage(ModuleMixture):
    """One stage of a pipeline with one layer; another stage has a later one."""

    def operators(self) -> ModelOperators:
        return super().operators().among({"layers.0": 4, "later": 4})

    def token_counts(self) -> HookedTokenCounts:
        return HookedTokenCounts([RoutingLayer(name, None, 4) for name in ("layers.0", "later")], counts_of)


class TestInMemory:
    """Snapshots of a process that selects alone: each copies one expert."""

    def test_an_expert_counts_as_copied_once_its_copy_is_complete(self) -> None:
        job = Job((4,), policy="load_aware")
        memory = job.saving.in_memory
        parts = dict.fromkeys(job.saving.units.values(), 1)
        for iteration in range(2):
            assert memory.left_out(iteration) == frozenset(), "nothing was measured"
            memory.copied({**parts, "rest": 1}, 1.0, 1.0)
        job.saving.agree_in_memory()

        def chosen() -> set[str]:
            job.train([1, 4, 2, 2])
            left = memory.left_out(job.adapter.iteration)
            return {unit for name, unit in job.saving.units.items() if name not in left}

        assert chosen() == {"00000-00001"}
        assert chosen() == {"00000-00001"}, "the snapshot before was skipped"
        memory.copied({"00000-00001": 1, "rest": 1}, 1.0, 1.0)
        assert chosen() == {"00000-00002"}
        job.save(whole=True)  # and it is skipped
        assert chosen() == {"00000-00002"}
        memory.copied(parts, 1.0, 1.0)
        assert chosen() == {"00000-00001"}, "all were copied"

    def test_what_a_skipped_snapshot_would_have_copied_is_in_the_next(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A running job: of its buffers none is free at one iteration."""
        monkeypatch.setattr(InMemory, "wanted_bytes", lambda experts: 1.0)
        model, skipped = Model((4,)), 13
        adapter = TorchAdapter(model, torch.optim.AdamW(model.parameters()), experts=MixtureOfExperts(counts_of))
        config = {"run_dir": tmp_path, "experts": {"policy": "load_aware"}, "memory": {"interval_iterations": 1}}
        copied, taken = dict[int, list[str]](), list[Any]()
        with CPSRRecovery(adapter, config | {"checkpoint": {"interval_iterations": 100}}) as recovery:
            pool = recovery.life.saver.pool
            for _ in recovery.resume(range(100), repeat=True):
                if recovery.iteration == skipped:
                    assert pool.running is None
                    for one in filter(None, taken):
                        pool.release(one)
                elif pool.running is not None:
                    copied[recovery.iteration] = [one for one in pool.running.copied_parts if one.startswith("00000")]
                if recovery.iteration == skipped + 1:
                    break
                adapter.optimizer.zero_grad()
                model([[1, 29, 20, 2]]).backward()
                recovery.life.saver.finish()
                pool.settle()
                taken = [pool.acquire(0) for _ in range(3)] if recovery.iteration == skipped - 1 else []
                adapter.optimizer.step()
        later = [copied[at] for at in (11, 12, 14)]
        assert later == [["00000-00002"], ["00000-00001"], ["00000-00002"]], "60 unsaved, and 58"

    def test_steps_that_copies_make_longer_leave_experts_out(self, tmp_path: Path) -> None:
        """A running job whose steps last longer by each expert that is copied to and in host memory meanwhile."""
        model, moved, copied = Model((EXPERTS,)), list[int](), list[int]()
        adapter = TorchAdapter(model, torch.optim.AdamW(model.parameters()), experts=MixtureOfExperts(counts_of))
        config = {"run_dir": tmp_path, "experts": {"policy": "moetion"}, "memory": {"interval_iterations": 1}}
        with CPSRRecovery(adapter, config | {"checkpoint": {"interval_iterations": 1000}}) as recovery:
            for _ in recovery.resume(range(COMPARED + 10), repeat=True):
                if recovery.iteration == COMPARED + 10:
                    break
                snapshot = recovery.life.saver.pool.running
                if snapshot is not None:
                    copied.append(sum(part.startswith("00000") for part in snapshot.copied_parts))
                    moved.append(copied[-1] + snapshot.carried_bytes // EXPERT_BYTES)
                    time.sleep(0.004 * moved[-1])  # far more than a busy machine adds by chance
                adapter.optimizer.zero_grad()
                model([[2] + [1] * (EXPERTS - 1)]).backward()
                adapter.optimizer.step()
        assert copied[:5] == [EXPERTS] * 5
        assert copied[-8:] == [1] * 8
        assert moved[-4:] == [BUFFERS] * 4, "once from the engine, and then into each other buffer"

    @pytest.mark.parametrize("owners", [1, None])
    @pytest.mark.parametrize("policy", ["load_aware", "moetion"])
    def test_a_stage_of_a_pipeline_copies_what_it_hides_of_its_own_layers(
        self, policy: str, owners: int | None
    ) -> None:
        job = Job((4,))
        mixture = Stage(job.model, [name for name, _ in job.model.named_parameters()], MixtureOfExperts(counts_of))
        tokens = RoutedTokens(job.adapter, mixture, mixture.operators(), job.adapter.shard())
        layers = [replace(layer, expert_bytes=EXPERT_BYTES) for layer in tokens.layers]
        policy_of = partial(policy_named, policy, lost_portion_limit=0.05)
        memory = InMemory(tokens, layers, policy_of, by_bytes=policy == "moetion", owners=owners)
        memory.agree(Agreed(2 * EXPERT_BYTES, numpy.ones(8), numpy.ones(8), 0.0))
        assert len({tokens.units[name] for name in memory.left_out(1)}) == 4 - 2

    def test_a_rank_without_experts_limits_no_other(self) -> None:
        saving = Job((4,), frozen=".experts.").saving
        for _ in range(2):
            assert saving.in_memory.left_out(0) == frozenset()
            saving.in_memory.copied({"rest": 100}, 1.0, 1e-3)
        assert saving.in_memory.wanted_bytes() == math.inf


class TestBudgets:
    @pytest.mark.parametrize("spread", [0.1, 0.3])
    def test_steps_that_differ_by_chance_leave_no_expert_out(
        self, spread: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        drawn, now = random.Random(0), [0.0]
        monkeypatch.setattr("cpsr.experts.copy_budget.time", SimpleNamespace(perf_counter=lambda: now[0]))

        def budget(longer: float) -> float:
            found = Lengthening()
            for place in range(40):
                much = place // TEN % 2 == 1
                found.begin(place, much if place % TEN >= UNLIKE else None)
                found.moved(1000 if much else 100)
                now[0] += drawn.lognormvariate(0.0, spread) + longer * much
            return found.bytes

        assert sum(budget(0.0) < 1000 for _ in range(200)) < 10
        assert sum(budget(1.0) < 100 for _ in range(200)) > 190

    def test_as_many_as_the_disk_takes_once_it_was_measured(self) -> None:
        job = Job((4,), policy="moetion")
        job.save(whole=True)
        rest = job.adapter.shard().state_bytes - 4 * EXPERT_BYTES
        assert len(job.saved_after([1, 1, 1, 1]) or ()) == 1  # K, until then
        job.saving.note_saved(rest + 4 * EXPERT_BYTES, 2.0, 1.0)  # half of everything in an interval
        job.saving.note_saved(rest + 3 * EXPERT_BYTES, 1.0, 1.0)
        job.saving.note_saved(10**9, 0.1, 1.0)  # an outlier; the median holds
        job.saving.note_saved(0, 0.0, 1.0)  # nothing was written, and nothing measured
        numbers = [len(job.saved_after([1, 1, 1, 1]) or ()) for _ in range(5)]
        assert numbers == [3] * 5

    def test_a_stage_of_a_pipeline_spends_its_bytes_on_its_own_layers(self) -> None:
        job = Job((4,))
        shard = job.adapter.shard()
        mixture = Stage(job.model, [name for name, _ in job.model.named_parameters()], MixtureOfExperts(counts_of))
        tokens = RoutedTokens(job.adapter, mixture, mixture.operators(), shard)
        saving = ExpertSaving(tokens, mixture, shard, ExpertsConfig(policy="moetion"), Group())
        saving.note_saved(shard.state_bytes - EXPERT_BYTES, 1.0, 1.0)
        units = saving.choose(0, whole=False) or frozenset()
        assert sum(unit.startswith("00000") for unit in units) == 3


class TestRecovery:
    def trained(self, **settings: Any) -> Job:
        """Three checkpoints: 1 of all, 2 of one expert of each layer, 3 of another one."""
        job = Job((3, 2), **settings)
        job.train([2, 2, 2], [3, 3])
        job.save(whole=True)
        for numbers in ([1, 2, 3], [2, 4]), ([1, 1, 4], [3, 3]):
            job.saved_after(*numbers)
        return job

    def test_what_was_lost_by_layer_and_in_all(self) -> None:
        job, back = self.trained(), Job((3, 2))
        back.saving.load_state_dict(through_a_checkpoint(job.saving.state_dict()))
        ages = {"00000-00000": 1, "00000-00001": 2, "00000-00002": 3, "00001-00000": 2, "00001-00001": 3}
        report = back.saving.restored(ages, 3)
        assert json.loads(json.dumps(report)) == report
        first, second = report["layers"]
        assert (first["lost_tokens"], second["lost_tokens"]) == (1 + 1 + 1, 3)  # of 18 each
        assert (first["stale_experts"], first["oldest_iteration"], first["assigned_tokens"]) == (2, 1, 18)
        assert (first["layer"], second["stale_experts"]) == ("layers.0", 1)
        assert report["lost_portion"] == report["lost_portion_of_run"] == 6 / 36
        assert report["momentary_loss_of_run"] == {"total": pytest.approx(6 / 18), "mean": pytest.approx(3 / 18)}

    def test_failures_add_up_and_a_whole_checkpoint_comes_between(self) -> None:
        job = self.trained()
        assert job.saving.restored({"00000-00000": 2}, 3)["lost_portion_of_run"] == 1 / 36
        job.save(whole=True)
        job.saved_after([6, 0, 0], [6, 0])
        report = job.saving.restored({"00000-00000": 3}, 4)
        assert report["lost_portion"] == 6 / 48
        assert report["lost_portion_of_run"] == 7 / 48

    def test_an_engine_without_a_limit_is_logged_once(self, caplog: pytest.LogCaptureFixture) -> None:
        job = self.trained()
        with caplog.at_level(logging.INFO):
            job.saving.restored({"00000-00000": 1, "00001-00000": 1}, 3)
        assert [record.message.split(",")[0] for record in caplog.records] == [
            "layer 'layers.0' has experts that recover"
        ]

    def test_a_state_of_other_experts_is_refused(self) -> None:
        with pytest.raises(ValueError, match="tokens of 5 experts were saved, and the model has 4"):
            Job((2, 2)).saving.load_state_dict(self.trained().saving.state_dict())


SCRIPT = textwrap.dedent(
    """
    import json, sys
    import torch, torch.distributed as dist
    from cpsr.config import ExpertsConfig
    from cpsr.engines import TorchAdapter
    from cpsr.engines.moe.token_counts import MixtureOfExperts
    from cpsr.ranks.group import Group
    from tests.experts.test_saving import EXPERT_BYTES, Model, Watching, counts_of, saving_of
    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), Group()
    torch.manual_seed(0)
    model = Model((4, 2))
    called = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters())
    adapter = TorchAdapter(called, optimizer, experts=MixtureOfExperts(counts_of))
    found = {}
    for policy in ("load_aware", "moetion"):
        saving = saving_of(adapter, ExpertsConfig(policy=policy), group)
        adapter.attach(Watching(saving))
        chosen = []
        for step in range(3):
            optimizer.zero_grad()
            called([[3, 1, 0, 0], [4, 0]] if rank == 0 else [[0, 2, 0, 2], [0, 4]]).backward()
            optimizer.step()
            units = saving.choose(adapter.iteration, whole=step == 0 and rank == 1)
            chosen.append(units and sorted(units))
            rest = adapter.shard().state_bytes - 6 * EXPERT_BYTES
            saving.note_saved(rest + (6 - 2 * rank) * EXPERT_BYTES, 1.0, 1.0)
        report = saving.restored({"00000-00000": adapter.iteration - rank}, adapter.iteration)
        found[policy] = [chosen, report["layers"][0]["oldest_iteration"] - adapter.iteration, report["lost_portion"]]
        adapter.detach()
        saving.tokens.close()
    group.close()
    json.dump(found, open(sys.argv[1] + f".{rank}", "w"))
    dist.destroy_process_group()
    """
)


def test_ranks_choose_alike(tmp_path: Path) -> None:
    """By the tokens of both, by what either asks for, and by the smaller of their budgets."""
    first, second = run(SCRIPT, tmp_path)
    assert first == second
    chosen, age, portion = first["load_aware"]
    # 3 tokens to experts 0 and 1, 2 to expert 3, and 4 to both of the other layer, in each step
    assert chosen == [None, ["00000-00000", "00001-00000"], ["00000-00001", "00001-00001"]]
    assert age == -1
    assert portion == 3 / (3 * 16)
    assert [units and len(units) for units in first["moetion"][0]] == [None, 4, 4]


def test_a_loop_that_ends_at_a_whole_checkpoint_keeps_it(tmp_path: Path) -> None:
    """Only sparse ones are replaced by a whole one at the end; meanwhile a kill would leave no checkpoint at all."""
    model = Model((3, 2))
    adapter = TorchAdapter(
        model, optimizer := torch.optim.AdamW(model.parameters()), experts=MixtureOfExperts(counts_of)
    )
    checkpoint = {"interval_iterations": 5, "shared_memory": False}
    settings = {"run_dir": tmp_path, "checkpoint": checkpoint, "experts": {"policy": "sequential"}}
    with CPSRRecovery(adapter, settings) as recovery:
        for _ in recovery.resume([0] * 5, epochs=1):
            optimizer.zero_grad()
            model(((1, 1, 1), (2, 1))).backward()
            optimizer.step()
    names = steps_in(tmp_path / "checkpoints")
    assert [name for name in names if "5" in name and not name.startswith(".")] == [step_name(5)]
