"""Limits of this process, really set."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cpsr.config import CPSRConfig
from cpsr.doctor.limits import check_locked_memory, check_open_files
from cpsr.doctor.needs import Launched, Needs


@contextmanager
def limited(kind: int, soft: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def needs(ranks: int = 1, **settings: object) -> Needs:
    return Needs(CPSRConfig.load({"run_dir": "run", **settings}), Launched(ranks, 1))


@pytest.mark.parametrize(
    ("soft", "ranks", "level"), [(4096, 8, "ok"), (500, 8, "warning"), (1024, 512, "warning"), (256, 512, "error")]
)
def test_open_files_are_counted_against_the_ranks(soft: int, ranks: int, level: str) -> None:
    with limited(resource.RLIMIT_NOFILE, soft):
        found = check_open_files(needs(ranks))
    assert found.level == level
    assert found.figures["soft"] == soft
    assert level == "ok" or "ulimit -n" in found.advice


def test_locked_memory_matters_for_rdma_alone(tmp_path: Path) -> None:
    with limited(resource.RLIMIT_MEMLOCK, 65536):
        assert check_locked_memory(tmp_path / "none").level == "ok"
        (tmp_path / "mlx5_0").mkdir()
        found = check_locked_memory(tmp_path)
    assert found.level == "warning"
    assert "mlx5_0" in found.advice
    assert found.figures["soft_bytes"] == 65536
