import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpsr.benchmarks.harness.checkpoint_files import edit_commit, remove_checkpoint, rest_file
from cpsr.checkpoint.catalogue import Catalogue, _thinned, scan
from cpsr.checkpoint.host_snapshot import Contents
from cpsr.checkpoint.saved import operator_record
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore
from cpsr.errors import CheckpointCorruptError, CheckpointError, CPSRError, RunMismatchError, UnsupportedEngineError
from cpsr.export import whole_checkpoint
from cpsr.export.command import write_state_dict
from cpsr.export.whole_checkpoint import open_whole, state_dict
from cpsr.state.frozen_parameters import FrozenPlace
from cpsr.state.shard import Shard
from tests.checkpoint.frozen_ranks import CUTS, RUN, Life, base, split_life
from tests.export.made import RUN_ID, SCALARS, operator, shard, write_checkpoint, write_identity


def test_slices_of_every_split_are_put_together(tmp_path_factory: pytest.TempPathFactory) -> None:
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def holds(data: Any) -> None:
        """Any shapes, cut anywhere, dealt to ranks in any order; some ranks hold nothing of a parameter."""
        run_dir = tmp_path_factory.mktemp("split")
        ranks = data.draw(st.integers(1, 4))
        parts: list[list[Any]] = [[] for _ in range(ranks)]
        whole = {}
        for number, shape in enumerate(data.draw(st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=3))):
            name, total = f"layer.{number}", math.prod(shape)
            flat = whole[name] = torch.randint(1000, (total,)).float()
            cuts = sorted(data.draw(st.lists(st.integers(0, total), min_size=ranks - 1, max_size=ranks - 1)))
            bounds = list(zip([0, *cuts], [*cuts, total], strict=True))
            for rank, (start, stop) in enumerate(data.draw(st.permutations(bounds))):
                parts[rank].append(operator(name, flat[start:stop].clone(), shape, start))
        write_identity(run_dir)
        write_checkpoint(run_dir, *(shard(*part) for part in parts))
        state = open_whole(run_dir, None)
        for name in state.parameters:
            assert torch.equal(state.weights(name).reshape(-1), whole[name])
            assert torch.equal(state.moment(name, "exp_avg_sq").reshape(-1), whole[name] + 2)
        assert {name for name, flat in whole.items() if flat.numel()} <= set(state.parameters)

    holds()


def replicas(second: torch.Tensor) -> tuple[Shard, Shard]:
    return shard(operator("w", torch.arange(4.0), (4,))), shard(operator("w", second, (4,)))


def test_what_one_rank_wrote_for_both_is_found(tmp_path: Path) -> None:
    first, second = (
        shard(operator("v", torch.ones(3), (3,)), operator("w", torch.arange(4.0), (4,))) for _ in range(2)
    )
    alike = {name: operator_record(one).described for name, one in first.operators.items()}
    write_identity(tmp_path)
    stores = [CheckpointStore(tmp_path, rank, 2, RUN_ID, 1) for rank in range(2)]
    stores[0].prepare()
    for store, part, others in zip(stores, (first, second), ({"v": 1}, {"w": 0}), strict=True):
        store.write(Snapshot(50, part, SCALARS, contents=Contents(writers=others, replicated=alike)))
    assert stores[0].commit(50, 5.0, threading.Event()).committed
    state = open_whole(tmp_path, 50)
    assert torch.equal(state.weights("v"), torch.ones(3))
    assert torch.equal(state.weights("w"), torch.arange(4.0))
    assert torch.equal(state.moment("v", "exp_avg"), torch.full((3,), 2.0))


REFUSED = {
    "other values": (replicas(torch.tensor([0.0, 1.0, 2.0, 4.0])), "other values of w"),
    "an overlap": (
        (shard(operator("w", torch.ones(3), (4,))), shard(operator("w", torch.ones(2), (4,), 2))),
        "do not make",
    ),
    "a block": ((shard(operator("w", torch.ones(4), (2, 4), 0, block=(2, 2))),), "split in blocks over the ranks"),
    "other shapes": (
        (shard(operator("w", torch.ones(2), (4,))), shard(operator("w", torch.ones(2), (2, 2), 2))),
        "not one tensor",
    ),
    "an expert": (
        (shard(operator("l.deepspeed_moe.experts.deepspeed_experts.0.w", torch.ones(4), (4,))),),
        "MoE layer",
    ),
    "a path": ((shard(operator("../../escaped", torch.ones(4), (4,))),), "cannot be the name"),
    "a path of a buffer": ((shard(operator("w", torch.ones(4), (4,)), **{"..": torch.ones(1)}),), "cannot be the name"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_one_model_is_refused_by_name(tmp_path: Path, case: str) -> None:
    shards, message = REFUSED[case]
    write_identity(tmp_path)
    write_checkpoint(tmp_path, *shards)
    with pytest.raises(UnsupportedEngineError, match=message) as refused:
        open_whole(tmp_path, None).weights("w")
    assert str(tmp_path) in str(refused.value)


def test_frozen_parameters_are_the_first_ranks_and_buffers_are_rank_0s(tmp_path: Path) -> None:
    write_identity(tmp_path, frozen={"kept": [2]})
    parts = [shard(kept=torch.ones(2), seen=torch.tensor(number)) for number in (1, 2)]
    write_checkpoint(tmp_path, *parts)
    outside = open_whole(tmp_path, None).outside()
    assert torch.equal(outside["kept"], torch.ones(2))
    assert int(outside["seen"]) == 1


def test_split_frozen_parameters_without_their_places_are_refused_by_name(tmp_path: Path) -> None:
    """Their order over the ranks is that of a mesh, and columns are no consecutive parts."""
    write_identity(tmp_path, engine="torch", zero_stage=None, frozen={"frozen": [2, 3], "kept": [2]})
    parts = [shard(frozen=torch.ones(1, 3), kept=torch.ones(2)), shard(frozen=torch.ones(1, 3), kept=torch.ones(2))]
    write_checkpoint(tmp_path, *parts)
    with pytest.raises(UnsupportedEngineError, match="the frozen parameter frozen whole"):
        open_whole(tmp_path, None).outside()


@pytest.mark.parametrize("how", CUTS)
def test_frozen_parameters_are_put_together_by_their_places(tmp_path: Path, how: str) -> None:
    """Also one that has moved, which is in the ranks' small states."""
    weights = base()
    frozen = {name: list(one.shape) for name, one in weights.items()}
    write_identity(tmp_path, engine="torch", zero_stage=None, frozen=frozen, run_id=RUN)
    life = split_life(tmp_path, weights, 3, how)
    for parts in life.weights:
        parts["embed"].add_(1)
    life.save(10, shared=False, trained=shard())
    outside = open_whole(tmp_path, None).outside()
    assert {name for name in outside if name in frozen} == frozen.keys()
    assert torch.equal(outside["embed"], weights["embed"] + 1)
    assert all(torch.equal(outside[name], one) for name, one in weights.items() if name != "embed")


def test_channels_last_weights_come_back_in_their_own_order(tmp_path: Path) -> None:
    weights = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    flat = weights.as_strided((weights.numel(),), (1,)).clone()
    write_identity(tmp_path, strides={"w": list(weights.stride())})
    write_checkpoint(tmp_path, shard(operator("w", flat, weights.shape)))
    found = open_whole(tmp_path, None).weights("w")
    assert torch.equal(found, weights)
    assert found.is_contiguous()


def test_the_newest_whole_checkpoint_is_the_default(tmp_path: Path) -> None:
    write_identity(tmp_path)
    for iteration in (10, 20, 30):
        write_checkpoint(tmp_path, shard(operator("w", torch.ones(4), (4,))), iteration=iteration)
    _thinned(scan(tmp_path / "checkpoints").checkpoints[-1])
    assert open_whole(tmp_path, None).saved.iteration == 20
    assert open_whole(tmp_path, 10).saved.iteration == 10
    for iteration in (15, 30):  # never taken, and thinned to its weights
        with pytest.raises(CheckpointError, match=rf"iteration {iteration}; whole ones are \[10, 20\]"):
            open_whole(tmp_path, iteration)


def test_one_flipped_byte_is_found_where_it_is_read(tmp_path: Path) -> None:
    write_identity(tmp_path)
    parts = (shard(operator("w", torch.ones(4), (8,), start), seen=torch.ones(3)) for start in (0, 4))
    directory = write_checkpoint(tmp_path, *parts)
    file = rest_file(directory, 1)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    state = open_whole(tmp_path, None)
    assert torch.equal(state.weights("w"), torch.ones(8))
    with pytest.raises(CheckpointCorruptError, match=file.name):
        state.moment("w", "exp_avg_sq")


def test_a_checkpoint_is_read_to_its_end_though_the_job_deletes_it(tmp_path: Path) -> None:
    write_identity(tmp_path)
    directory = write_checkpoint(tmp_path, shard(operator("w", torch.ones(4), (4,))))
    state = open_whole(tmp_path, None)
    remove_checkpoint(directory)
    assert torch.equal(state.weights("w"), torch.ones(4))
    assert state.scalars()


def test_one_that_another_save_replaces_meanwhile_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_identity(tmp_path)
    directory = write_checkpoint(tmp_path, shard(operator("w", torch.ones(4), (4,))))

    def replacing(checkpoints: Path) -> Catalogue:
        found = scan(checkpoints)
        edit_commit(directory, lambda manifest: manifest.update(attempt=manifest["attempt"] + 1))
        return found

    monkeypatch.setattr(whole_checkpoint, "scan", replacing)
    with pytest.raises(CheckpointError, match="was deleted, replaced, or thinned") as raised:
        open_whole(tmp_path, None)
    assert not isinstance(raised.value, CheckpointCorruptError)


def test_runs_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunMismatchError, match=r"no run\.json"):
        open_whole(tmp_path, None)
    write_checkpoint(tmp_path, shard(operator("w", torch.ones(4), (4,))))
    (tmp_path / "run.json").write_bytes(b"\x80\x04.")
    with pytest.raises(CPSRError, match="cannot be used"):
        open_whole(tmp_path, None)
    write_identity(tmp_path, engine="PipelineEngine")
    with pytest.raises(UnsupportedEngineError, match="pipeline"):
        open_whole(tmp_path, None)
    write_identity(tmp_path, run_id="another")
    with pytest.raises(CheckpointError, match="of the run 'made'"):
        open_whole(tmp_path, None)


def test_checkpoints_that_leave_experts_out_are_refused(tmp_path: Path) -> None:
    write_identity(tmp_path)
    part = shard(operator("moe.w", torch.ones(4), (4,)))
    experts = frozenset(part.operators)
    store = CheckpointStore(tmp_path, 0, 1, RUN_ID, 1)
    store.prepare()
    store.write(Snapshot(50, part, SCALARS, contents=Contents.sparse(experts, experts)))
    assert store.commit(50, 5.0, threading.Event()).committed
    with pytest.raises(UnsupportedEngineError, match=r"saved with experts\.policy"):
        open_whole(tmp_path, 50)


def test_names_are_the_modules_own(tmp_path: Path) -> None:
    write_identity(
        tmp_path, aliases={"head.w": "w", "old.seen": "seen"}, transient=["scratch"], extra=["q._extra_state"]
    )
    others = {"seen": torch.tensor(3), "scratch": torch.ones(2)}
    write_checkpoint(tmp_path, shard(operator("w", torch.arange(4.0), (2, 2)), **others))
    state = open_whole(tmp_path, None)
    found = state_dict(state, "fp32")
    assert set(found) == {"w", "head.w", "seen", "old.seen"}
    assert torch.equal(found["head.w"], torch.arange(4.0).view(2, 2))
    assert found["seen"].dtype == torch.int64
    assert "q._extra_state" in write_state_dict(state, tmp_path / "model.safetensors", "fp32")[1]


def test_fp32_widens_and_never_narrows(tmp_path: Path) -> None:
    write_identity(tmp_path, precision="bf16", frozen={"frozen": [2]})
    others = {"frozen": torch.ones(2, dtype=torch.bfloat16), "mean": torch.ones(2, dtype=torch.float64)}
    write_checkpoint(tmp_path, shard(operator("w", torch.full((2,), 1 / 3), (2,)), **others))
    state = open_whole(tmp_path, None)
    wide, trained = state_dict(state, "fp32"), state_dict(state, "trained")
    assert [wide[name].dtype for name in ("w", "frozen", "mean")] == [torch.float32, torch.float32, torch.float64]
    assert [trained[name].dtype for name in ("w", "frozen", "mean")] == [torch.bfloat16, torch.bfloat16, torch.float64]
    assert torch.equal(wide["w"], torch.full((2,), 1 / 3))
    assert torch.equal(trained["w"], wide["w"].bfloat16())


def test_weights_are_exported_where_moments_are_lost(tmp_path: Path) -> None:
    write_identity(tmp_path)
    directory = write_checkpoint(tmp_path, shard(operator("w", torch.arange(4.0), (4,))))
    lost = rest_file(directory)
    lost.unlink()
    assert torch.equal(open_whole(tmp_path, None, moments=False).weights("w"), torch.arange(4.0))
    with pytest.raises(CheckpointCorruptError, match=f"{lost.name}: is missing"):
        open_whole(tmp_path, None)


def test_parts_of_a_frozen_parameter_that_differ_are_refused(tmp_path: Path) -> None:
    weights = torch.arange(2.0)
    places = [{"w": FrozenPlace((4,), start)} for start in (0, 0, 2)]
    life = Life(tmp_path, [{"w": weights.clone()}, {"w": weights + 10}, {"w": weights + 2}], 1, places)
    life.save(10, shared=False, trained=shard(operator("t", torch.ones(2), (2,))))
    write_identity(tmp_path, run_id=RUN, frozen={"w": [4]})
    with pytest.raises(UnsupportedEngineError, match="rank 1 holds other values of w"):
        open_whole(tmp_path, None).outside()
