"""What stays and what goes, as rules and over random sequences of saves, roll-backs and damage."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cpsr.checkpoint.catalogue as catalogue_module
from cpsr.checkpoint.catalogue import CheckpointInfo, Retention, plan_retention
from cpsr.checkpoint.manifest import Manifest, RankRecord
from cpsr.checkpoint.store import CheckpointStore, verify_run
from tests.checkpoint.conftest import assert_same_bits, make_shard, make_snapshot, save

FULL, THIN = 300, 100


def infos(iterations: list[int], full: int) -> list[CheckpointInfo]:
    files = {"rank-00000.params.safetensors": THIN, "rank-00000.moments.safetensors": FULL - THIN}
    rank = RankRecord(sha256="0" * 64, files=files)
    made: dict[str, Any] = {"run_id": "run", "life": 1, "attempt": 0, "world_size": 1, "label": None}
    made |= {"created_unix_seconds": 0.0, "ranks": {0: rank}}
    return [
        CheckpointInfo(Path("x"), Manifest(iteration=one, sequence=n, **made), n >= len(iterations) - full)
        for n, one in enumerate(iterations)
    ]


def plan(
    iterations: list[int], full: int = 3, other_bytes: int = 0, copied: int | None = None, **config: int
) -> tuple[list[int], list[int]]:
    settings_ = Retention(**({"history_span_iterations": 100, "history_min_checkpoints": 2} | config))
    made = plan_retention(infos(iterations, full), settings_, other_bytes, copied)
    return made.thin, made.delete


def test_rules() -> None:
    assert plan([10]) == ([], [])
    assert plan([10, 20, 30]) == ([10], [])
    assert plan([10, 20, 30, 120, 130]) == ([30], [10, 20])
    assert plan([10, 20, 300, 400], full_checkpoints=3) == ([], [10])
    assert plan([10, 200, 300, 400], history_min_checkpoints=4) == ([200], [])
    assert plan([10, 20, 30, 40], full=4) == ([10, 20], [])
    assert plan([10, 20, 30, 40], full=4, copied=20) == ([10], [])


def test_the_cap_drops_the_oldest_history_first_and_never_the_newest_full_one() -> None:
    steps = [10, 20, 30, 40, 50]
    assert plan(steps, disk_limit_bytes=900) == ([30], [])
    assert plan(steps, disk_limit_bytes=899) == ([30], [10])
    assert plan(steps, disk_limit_bytes=899, other_bytes=200) == ([], [10, 20, 30])
    assert plan(steps, disk_limit_bytes=350) == ([], [10, 20, 30, 40])
    assert plan(steps, disk_limit_bytes=1) == ([], [10, 20, 30, 40])


@given(
    steps=st.lists(st.integers(0, 1000), unique=True, min_size=1).map(sorted),
    span=st.integers(0, 500),
    minimum=st.integers(2, 6),
    full=st.integers(2, 4),
)
def test_the_newest_are_never_touched(steps: list[int], span: int, minimum: int, full: int) -> None:
    thin, delete = plan(
        steps, len(steps), history_span_iterations=span, history_min_checkpoints=minimum, full_checkpoints=full
    )
    assert not {*thin, *delete} & set(steps[-full:])
    assert not set(delete) & set(steps[-minimum:])
    assert not set(thin) & set(delete)
    assert all(steps[-1] - step > span for step in delete)


@settings(max_examples=25, deadline=None)
@given(
    actions=st.lists(
        st.sampled_from(["save", "save", "save", "roll back", "damage", "cut off", "restart"]),
        min_size=3,
        max_size=12,
    ),
    limit=st.none() | st.integers(1, 40_000),
)
def test_after_any_sequence_the_newest_two_are_whole(actions: list[str], limit: int | None) -> None:
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory)
        config = Retention(history_span_iterations=30, disk_limit_bytes=limit)
        life, iteration = 1, 0
        store = CheckpointStore(run_dir, 0, 1, "run", life)
        store.prepare()
        for action in actions:
            full = [info.iteration for info in store.catalogue() if info.full]
            if action == "save":
                iteration += 10
                save(store, iteration)
                store.retain(config)
                expected = [*full, iteration][-2:] if limit is None else [iteration]
            elif action == "roll back" and full:
                iteration = full[0]
                store.abandon_after(iteration, "a test")
                expected = [iteration]
            elif action == "damage" and full:
                store.quarantine(full[-1], "a test")
                expected = full[:-1]
            elif action == "cut off":
                store.write(make_snapshot(iteration + 10))
                expected = full
            else:
                life += 1
                store = CheckpointStore(run_dir, 0, 1, "run", life)
                store.prepare()
                expected = full
            now = [info.iteration for info in store.catalogue() if info.full]
            assert now[-len(expected) :] == expected if expected else not now
            for step in expected:
                shard = make_shard(1)
                assert store.load(step, shard)["step"] == step
                assert_same_bits(shard, make_shard(step))
            assert verify_run(run_dir) == []


def test_what_was_set_aside_goes_after_two_more_commits(store: CheckpointStore) -> None:
    config = Retention()
    for iteration in (10, 20, 30):
        save(store, iteration)
    store.quarantine(30, "damaged")
    store.abandon_after(10, "rolled back")

    def aside() -> list[str]:
        return sorted(path.name for path in store.directory.iterdir() if not path.name.startswith("step-"))

    both = ["abandoned-step-0000000020-3-0", "damaged-step-0000000030-3-0"]
    store.retain(config)
    assert aside() == both
    save(store, 20)
    store.retain(config)
    assert aside() == both
    save(store, 30)
    store.retain(config)
    assert aside() == []


def test_a_directory_that_is_thinned_already_is_not_forced_to_the_disk_again(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced: list[str] = []
    monkeypatch.setattr(catalogue_module, "sync_directory", lambda path: forced.append(path.name))
    for iteration in (10, 20, 30):
        save(store, iteration)
    for _ in range(2):
        store.retain(Retention())
        assert forced == ["step-0000000010"]
