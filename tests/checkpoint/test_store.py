"""Round trips and refusals of the committed store."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsr.benchmarks.harness.checkpoint_files import commit_file, edit_part, slab_files, steps_in
from cpsr.checkpoint.catalogue import Retention, scan
from cpsr.checkpoint.manifest import step_name
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore, verify_run
from cpsr.checkpoint.verify import UnreadableFileError, verify_checkpoint
from cpsr.errors import CheckpointCorruptError, CheckpointError, RunMismatchError
from cpsr.state.shard import OperatorState, ParamSlice, Shard
from tests.checkpoint.conftest import RefuseReading, assert_same_bits, make_shard, make_snapshot, save

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64])
NAMES = st.text(min_size=1, max_size=12) | st.sampled_from(["../../etc", "a/b", "__metadata__", "", "é\n\0"])


def tensors(size: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Random bytes, so NaN and infinities are among the values."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)


@st.composite
def shards(draw: st.DrawFn) -> Shard:
    operators = {}
    for seed, name in enumerate(draw(st.lists(NAMES, max_size=4, unique=True))):
        size, dtype = draw(st.integers(0, 40)), draw(DTYPES)
        moments = {
            moment: tensors(size, seed + 100, draw(DTYPES))
            for moment in draw(st.lists(st.sampled_from(["exp_avg", "exp_avg_sq", "momentum_buffer"]), unique=True))
        }
        parameter = ParamSlice(tensors(size, seed, dtype), (size + 3, 2), 3)
        operators[name] = OperatorState(name, parameter, moments, draw(st.integers(0, 9)))
    others = {
        name: tensors(6, seed, draw(DTYPES)).reshape(draw(st.sampled_from([(2, 3), (6,), (1, 6, 1)])))
        for seed, name in enumerate(draw(st.lists(NAMES, max_size=3, unique=True)))
    }
    return Shard(operators, others)


def empty_like(shard: Shard) -> Shard:
    return Shard(
        {
            name: OperatorState(
                name,
                ParamSlice(torch.zeros_like(o.parameter.values), o.parameter.global_shape, o.parameter.offset),
                {moment: torch.zeros_like(values) for moment, values in o.moments.items()},
                0,
            )
            for name, o in shard.operators.items()
        },
        {name: torch.zeros_like(values) for name, values in shard.others.items()},
    )


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(), inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers(), inner, max_size=2)
    ),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None)
@given(shard=shards(), scalars=PLAIN)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, shard: Shard, scalars: Any) -> None:
    store = CheckpointStore(tmp_path_factory.mktemp("run"), 0, 1, "run", 1)
    store.prepare()
    store.write(Snapshot(9, shard, {"tree": scalars, "tensor": torch.arange(3), "inf": float("inf")}))
    assert store.commit(9, 1.0, threading.Event()).committed
    into = empty_like(shard)
    loaded = store.load(9, into)
    assert_same_bits(into, shard)
    assert repr(loaded["tree"]) == repr(scalars)  # repr, because NaN differs from itself
    assert loaded["tensor"].tolist() == [0, 1, 2]
    assert loaded["inf"] == float("inf")
    taken_at = {name: operator.iteration for name, operator in shard.operators.items()}
    assert {name: operator.iteration for name, operator in into.operators.items()} == taken_at
    assert verify_run(store.directory.parent) == []


def test_load_refuses_what_is_not_there_thinned_or_of_another_run(store: CheckpointStore, tmp_path: Path) -> None:
    save(store, 10)
    with pytest.raises(CheckpointError, match=r"not a committed checkpoint.*\[10\]"):
        store.load(11, make_shard())
    with pytest.raises(RunMismatchError, match="saved by 1 ranks, this job has 2"):
        CheckpointStore(tmp_path, 0, 2, "run", 1).load(10, make_shard())
    with pytest.raises(RunMismatchError, match="'other'"):
        CheckpointStore(tmp_path, 0, 1, "other", 1).load(10, make_shard())


@pytest.mark.parametrize("change", ["name", "extra", "shape", "offset", "dtype", "moment", "other"])
def test_another_model_is_refused_by_the_first_differing_tensor(store: CheckpointStore, change: str) -> None:
    save(store, 10)
    shard = make_shard(5)
    name = list(shard.operators)[2]
    operator = shard.operators[name]
    values, moments = operator.parameter.values, dict(operator.moments)
    first, shape, offset = f"param/{name}", operator.parameter.global_shape, 1
    if change in ("name", "extra"):
        shard.operators["z"] = OperatorState("z", operator.parameter, moments, 0)
        first = "param/z"
        if change == "name":
            del shard.operators[name]
    elif change == "other":
        shard.others["mask"], first = torch.ones(9), "other/mask"
    else:
        shape = (300, 1) if change == "shape" else shape
        offset = 2 if change == "offset" else offset
        values = values.double() if change == "dtype" else values
        if change == "moment":
            first = f"moment/momentum_buffer/{name}"
            moments["momentum_buffer"] = moments.pop("exp_avg")
        shard.operators[name] = OperatorState(name, ParamSlice(values, shape, offset), moments, 0)
    before = {key: tensor.clone() for key, tensor in shard.tensors()}
    with pytest.raises(RunMismatchError, match="first difference is") as caught:
        store.load(10, shard)
    assert f"first difference is {first}:" in str(caught.value)
    for key, tensor in shard.tensors():
        assert torch.equal(tensor, before[key])


def rename_file(record: dict[str, Any]) -> None:
    first = min(record["files"])
    record["files"]["../../outside"] = record["files"].pop(first)


def unknown_tag(record: dict[str, Any]) -> None:
    record["scalars"] = {"__cpsr__": "pickle", "data": "gASVCwAAAA=="}


@pytest.mark.parametrize(
    ("edit", "relist", "says"),
    [
        (rename_file, True, r"(manifest\.json|COMMIT): is refused"),
        (rename_file, False, "rank-00000-1.0.json: is refused"),
        (unknown_tag, True, "rank-00000-1.0.json: its scalars cannot be decoded"),
    ],
)
def test_malicious_manifests_are_refused(
    store: CheckpointStore, tmp_path: Path, edit: Any, relist: bool, says: str
) -> None:
    """As whoever can write there could change them, with every hash above."""
    save(store, 10)
    directory = store.directory / "step-0000000010"
    (tmp_path / "outside").write_bytes(min(slab_files(directory)).read_bytes())
    edit_part(directory, edit, relist=relist)
    with pytest.raises(CheckpointCorruptError, match=says):
        store.load(10, make_shard(5))


def test_prepare_removes_what_was_never_committed_and_nothing_else(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    save(store, 10)
    store.write(make_snapshot(20))
    (store.directory / "notes.txt").write_text("the user's")
    (store.directory / "step-0000000010" / ".rank-00000-1.0.json.77.tmp").write_text("x")
    save(store, 30)
    commit_file(store.directory / "step-0000000030").write_text("torn")
    problems = store.prepare()
    assert [(problem.iteration, problem.file.name) for problem in problems] == [(30, "COMMIT")]
    assert steps_in(store.directory) == [
        "damaged-step-0000000030-2-0",
        "notes.txt",
        "step-0000000010",
    ]
    assert "step-0000000020 was removed: it has no commit record" in caplog.text
    assert ".rank-00000-1.0.json.77.tmp was removed" in caplog.text
    assert verify_checkpoint(store.directory / step_name(10)) == []
    save(store, 30)


def test_a_read_that_fails_for_a_moment_changes_nothing(store: CheckpointStore, refuse_reading: RefuseReading) -> None:
    save(store, 10)
    save(store, 20)
    for times in (1, 2, 3):
        refuse_reading(store.directory / "step-0000000020", times)
        assert store.prepare() == []
        assert [info.iteration for info in store.catalogue()] == [10, 20]
        refuse_reading(store.directory / "step-0000000020", times)
        shard = make_shard()
        store.load(20, shard)
        assert_same_bits(shard, make_shard(20))


def test_what_cannot_be_read_now_stops_a_restart_and_is_never_set_aside(
    store: CheckpointStore, refuse_reading: RefuseReading, caplog: pytest.LogCaptureFixture
) -> None:
    for iteration in (10, 20, 30):
        save(store, iteration)
    before = sorted(store.directory.rglob("*"))
    refuse_reading(store.directory / "step-0000000020", 1_000)
    with pytest.raises(UnreadableFileError, match=r"step-0000000020.*Input/output error.* start again"):
        store.prepare()
    with pytest.raises(UnreadableFileError, match="COMMIT"):
        store.abandon_after(10, "a test")
    with pytest.raises(UnreadableFileError, match="may be whole"):
        store.load(20, make_shard(5))
    assert sorted(store.directory.rglob("*")) == before
    # A job that is running goes on with the others, and says so.
    assert [info.iteration for info in store.catalogue()] == [10, 30]
    assert "checkpoint is skipped" in caplog.text
    assert "step-0000000020" in store.remains()
    assert scan(store.directory).problems == []
    assert [problem.iteration for problem in verify_checkpoint(store.directory / step_name(20))] == [20]
    save(store, 40)
    store.retain(Retention(full_checkpoints=2, history_min_checkpoints=2, history_span_iterations=1))
    assert len(store.abandon_after(20, "a test")) == 2
    refuse_reading(store.directory / "step-0000000020", 0)
    assert verify_checkpoint(store.directory / step_name(20)) == []
