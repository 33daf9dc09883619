"""What the campaign damages: all of every file, in copies that share what the run shares."""

from pathlib import Path

from cpsr.benchmarks.faults.damage import NEWEST, files_of, holders, regions, step
from cpsr.benchmarks.faults.job import RANKS, copy_run, write_run, write_sparse


def test_a_copy_of_a_run_shares_the_files_that_the_run_shares(tmp_path: Path) -> None:
    write_sparse(tmp_path / "shared")
    copy_run(tmp_path / "shared", tmp_path / "copy")
    for run_dir in (tmp_path / "shared", tmp_path / "copy"):
        files = (run_dir / "checkpoints" / step(NEWEST)).glob("*.experts-*")
        carried = {path.name: holders(run_dir / "checkpoints", path.name) for path in files}
        assert carried == {
            f"rank-{rank:05d}.experts-{age:010d}.{kind}.safetensors": frozenset(range(age, NEWEST + 1, 10))
            for rank in range(RANKS)
            for age in (20, 30, 40)
            for kind in ("params", "moments")
        }


def test_the_regions_are_all_of_every_file(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    write_run(run_dir)
    for name in files_of(run_dir / "checkpoints"):
        path = run_dir / "checkpoints" / step(NEWEST) / name
        covered = [byte for region in regions(path) for byte in range(region.start, region.stop)]
        left = set(range(path.stat().st_size)) - set(covered)
        assert len(covered) == len(set(covered)), name
        # Header and tensors of a file of tensors are padded to eight bytes with spaces, which belong to nothing.
        assert {path.read_bytes()[byte : byte + 1] for byte in left} <= {b" "}, name
