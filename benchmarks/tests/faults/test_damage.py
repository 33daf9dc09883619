"""What the campaign damages: all of every file, and of which checkpoints."""

import itertools
from pathlib import Path

from cpsr.benchmarks.faults.damage import NEWEST, files_of, holders, newest, regions
from cpsr.benchmarks.faults.job import RANKS, write_run, write_sparse
from cpsr.benchmarks.harness.checkpoint_files import Kind, slab_files


def test_a_carried_slab_belongs_to_every_checkpoint_since_it_was_saved(tmp_path: Path) -> None:
    write_sparse(tmp_path)
    checkpoints = tmp_path / "checkpoints"
    kinds: tuple[Kind, ...] = "expert-weights", "expert-rest"
    for rank, kind in itertools.product(range(RANKS), kinds):
        files = [file.relative_to(checkpoints) for file in slab_files(newest(checkpoints), rank, kind)]
        carried = [holders(checkpoints, file) for file in files]
        assert carried == [frozenset(range(age, NEWEST + 1, 10)) for age in (20, 30, 40)]


def test_the_regions_are_all_of_every_file(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    write_run(run_dir)
    for file in files_of(run_dir / "checkpoints"):
        path = run_dir / "checkpoints" / file
        covered = [byte for region in regions(path) for byte in range(region.start, region.stop)]
        left = set(range(path.stat().st_size)) - set(covered)
        assert len(covered) == len(set(covered)), file
        # Header and tensors of a file of tensors are padded to eight bytes with spaces, which belong to nothing.
        assert {path.read_bytes()[byte : byte + 1] for byte in left} <= {b" "}, file
