"""A tiny run leaves its figures."""

import json
import os
from pathlib import Path

import pytest

from cpsr.benchmarks.upload.run import SENT, STORES, VERIFIED, main
from cpsr.benchmarks.upload.ways import CPSR, DEFAULTS, TUNED, Setting

pytest.importorskip("moto", reason="pip install 'cpsr[dev]'")
pytest.importorskip("s3fs", reason="pip install 'cpsr[s3]'")


def test_a_tiny_run_leaves_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "of the user")
    result = tmp_path / "upload.json"
    before = dict(os.environ)
    main(result, rounds=2, workdir=tmp_path, megabytes=[2], settings=[Setting(16, 4)])
    assert os.environ == before
    figures = json.loads(result.read_text())
    assert [one["store"] for one in figures["results"]] == list(STORES)
    for one in figures["results"]:
        assert one["peak_bytes"].keys() == {CPSR, DEFAULTS, TUNED}
        for kind in (VERIFIED, SENT):
            assert one["kinds"][kind]["seconds"].keys() == {CPSR, DEFAULTS, TUNED}
            assert one["kinds"][kind]["ratios"][TUNED]["value"] > 0
    assert result.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
