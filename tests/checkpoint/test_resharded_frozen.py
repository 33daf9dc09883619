"""Frozen weights that one number of ranks saved, whole or split, and another number takes."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsr.benchmarks.harness.checkpoint_files import frozen_files
from cpsr.checkpoint.manifest import step_name
from cpsr.checkpoint.saved import SavedCheckpoint
from cpsr.elastic.resharded_load import load_frozen
from cpsr.errors import CheckpointCorruptError, RunMismatchError
from cpsr.state.frozen_parameters import word_of
from tests.checkpoint.frozen_ranks import CUTS, Life, base, cut, split_life


def taken(other: Life, rank: int, iteration: int) -> Mapping[str, Any]:
    """Load as a restart does; returns the state."""
    directory = other.directory / step_name(iteration)
    saved = SavedCheckpoint(directory)
    saved_by = rank % saved.manifest.world_size
    files, state = other.files[rank], saved.small_state(saved_by)["frozen"]
    found = load_frozen(saved, saved_by, files, state)
    files.bring(found)
    return found


@settings(max_examples=30, deadline=None)
@given(
    before=st.integers(1, 4),
    after=st.integers(1, 5),
    how=st.sampled_from(CUTS),
    moving=st.sets(st.sampled_from(sorted(base()))),
    seed=st.integers(0, 99),
)
def test_every_rank_gets_its_part_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory,
    before: int,
    after: int,
    how: str,
    moving: set[str],
    seed: int,
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    weights = base(seed)
    old = split_life(run_dir, weights, before, how)
    for name in moving:
        weights[name] = weights[name] + 1
        for parts in old.weights:
            if name in parts:
                parts[name].add_(1)
    old.save(10, shared=how == "whole")
    new = split_life(run_dir, base(seed + 1), after, how, 2)
    for rank in range(after):
        state = taken(new, rank, 10)
        expected, _ = cut(weights, rank, after, how)
        own = new.weights[rank]
        assert own.keys() == expected.keys()
        assert all(torch.equal(own[name], expected[name]) for name in own)
        assert {name for name in state["moved"] if own[name].numel()} == {
            name for name in moving & own.keys() if own[name].numel()
        }
        new.frozen[rank].settle()
        left = {name: one for name, one in new.frozen[rank].hashes.items() if name not in state["moved"]}
        assert state["word"] == word_of(left)


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_a_file_that_is_missing_or_damaged_is_named(tmp_path: Path, damage: str) -> None:
    old = split_life(tmp_path, base(), 2, "rows")
    old.save(10, shared=False)
    path = frozen_files(old.directory / step_name(10))[-1]
    if damage == "missing":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    new = split_life(tmp_path, base(1), 1, "whole", 2)
    with pytest.raises(CheckpointCorruptError, match=re.escape(path.name)):
        taken(new, 0, 10)


def test_a_parameter_that_no_rank_has_saved_is_named(tmp_path: Path) -> None:
    weights = base()
    del weights["layers.1"]
    old = split_life(tmp_path, weights, 2, "rows")
    old.save(10, shared=False)
    with pytest.raises(RunMismatchError, match=r"no rank saved frozen/layers\.1"):
        taken(split_life(tmp_path, base(), 4, "rows", 2), 0, 10)
