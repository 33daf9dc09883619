"""The arithmetic of prediction's cost, the memory that is sampled, and that a tiny run leaves everything behind."""

import json
from pathlib import Path

import pytest
import torch

from cpsr.benchmarks.harness.processes import MemoryPeak, own_bytes
from cpsr.benchmarks.predictor_cost.history import SyntheticHistory
from cpsr.benchmarks.predictor_cost.measure import MethodSamples, measure_method
from cpsr.benchmarks.predictor_cost.run import main, result_of
from cpsr.demo.model import GPTConfig

MIB = 2**20
TINY = GPTConfig(layers=1, heads=2, width=16, context=8, vocabulary=97)


def test_rates_count_forecast_and_prediction_and_ratios_are_of_the_same_turn() -> None:
    # The second turn was slow as a whole, which leaves both bounds of a ratio where they are.
    samples = MethodSamples("line", 100, 10, 7.5, [0.1, 0.2], [1.0, 4.0, 1.0], [1.0, 5.0, 1.0], [1.0, 3.0, 1.0])
    found = result_of(samples, training=1.0)
    assert found["rate"]["value"] == pytest.approx(100 / 2)
    assert found["ratio"] == pytest.approx({"value": 0.5, "low": 0.5, "high": 0.5})
    assert found["ratio_of_predict"]["value"] == pytest.approx(1.0)
    assert list(found["aims"].values()) == [True, True, False]


def test_the_peak_is_found_after_the_memory_is_gone_again_and_a_mapped_file_is_no_memory_of_our_own(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mapped"
    path.write_bytes(b"\x01" * (64 * MIB))
    with MemoryPeak(own_bytes) as memory:
        mapped = torch.from_file(str(path), shared=False, size=64 * MIB, dtype=torch.uint8)
        assert int(mapped.max()) == 1
        values = torch.ones(64 * MIB // 4)
        while memory.peak_bytes - memory.before_bytes < 60 * MIB:  # the sampler sees it; else the test's time is over
            pass
        del values
    assert 60 * MIB <= memory.peak_bytes - memory.before_bytes < 80 * MIB


@pytest.mark.parametrize("method", ["default", "line"])
def test_a_method_predicts_from_a_runs_own_files(tmp_path: Path, method: str) -> None:
    history = SyntheticHistory(tmp_path / "h", TINY, checkpoints=4)
    history.write(lambda: None)
    samples = measure_method(method, history, repeats=1)
    assert samples.used_bytes == 4 * 4 * history.parameters
    assert (len(samples.slice_seconds) > 0) == (method == "default")


@pytest.mark.slow
def test_a_tiny_run_leaves_figures_and_cleans_up(tmp_path: Path) -> None:
    path, workdir = tmp_path / "predictor.json", tmp_path / "work"
    main("tiny", "line", 2, workdir, path, sizes={"tiny": TINY})
    (found,) = json.loads(path.read_text())["results"]
    assert found["ratio"]["value"] > 0
    assert 0 <= found["peak_bytes"] < 100 * MIB
    assert not list(workdir.iterdir())
