"""Configurations are read from where users keep them, and refused by key."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cpsr.config import CPSRConfig
from cpsr.config.renamed import RENAMED
from cpsr.errors import ConfigError

ARCHITECTURE = Path(__file__).parents[1] / "ARCHITECTURE.md"
OTHER_THAN_DEFAULT: dict[str, Any] = {
    "engines.offload_activations_bytes": 1 << 20,
    "restart.displacement_limit": 2.0,
    "restart.loss_tolerance_nats": 0.5,
    "restart.probe_batches": 2,
    "life.watch_iterations": 30,
    "life.watch_tolerance_nats": 0.25,
    "ranks.heartbeat_timeout_seconds": None,
    "ranks.sigterm_grace_seconds": 1.0,
    "ranks.step_timeout_seconds": 60.0,
    "ranks.stop_check_iterations": 5,
    "learning.budget_fraction": 0.0,
    "learning.memory_limit_bytes": 1000,
}
"""New name -> a value."""


def settings_of(path: str, value: Any) -> dict[str, Any]:
    section, _, key = path.rpartition(".")
    return {"run_dir": "x", **({section: {key: value}} if section else {key: value})}


def test_reads_yaml_json_and_the_block_of_a_deepspeed_file(tmp_path: Path) -> None:
    settings = {"run_dir": "runs/a", "checkpoint": {"interval_iterations": 50}}
    yaml_file, json_file, deepspeed = (tmp_path / name for name in ("a.yaml", "a.json", "deepspeed.json"))
    yaml_file.write_text("run_dir: runs/a\ncheckpoint:\n  interval_iterations: 50\n")
    json_file.write_text(json.dumps(settings))
    deepspeed.write_text(json.dumps({"train_batch_size": 8, "cpsr": settings}))
    expected = CPSRConfig.load(settings)
    assert expected.checkpoint.interval_iterations == 50
    for source in (yaml_file, str(json_file), deepspeed, expected):
        assert CPSRConfig.load(source) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"run_dir": "x", "chekpoint": {}}, "unknown key 'chekpoint'; did you mean 'checkpoint'"),
        (
            {"run_dir": "x", "checkpoint": {"interval_seconds": 5}},
            "unknown key 'checkpoint.interval_seconds'; did you mean 'checkpoint.interval_iterations'",
        ),
        ({"run_dir": "x", "planner": {"mtbf_hours": "12h"}}, "'planner.mtbf_hours' = '12h'"),
        ({"run_dir": "x", "checkpoint": {"interval_iterations": 1.5}}, "'checkpoint.interval_iterations' = 1.5"),
        ({"run_dir": "x", "checkpoint": {"interval_iterations": 0}}, "greater than or equal to 1"),
        ({"run_dir": "x", "mode": "fast"}, "'auto', 'predict' or 'exact'"),
        ({}, "the key 'run_dir' is required"),
        (
            {"run_dir": "x", "planner": {"interval_min_iterations": 9, "interval_max_iterations": 8}},
            "interval_min_iterations is larger",
        ),
        ({"cpsr": 3}, "expected a mapping"),
        (
            {"run_dir": "x", "ranks": {"heartbeat_timeout": 5.0}},
            "unknown key 'ranks.heartbeat_timeout'; did you mean 'ranks.heartbeat_timeout_seconds'",
        ),
        (
            {"run_dir": "x", "guard": {"watch": 5}},
            "unknown key 'guard.watch'; did you mean 'life.watch_iterations'",
        ),
        (
            {"run_dir": "x", "coordinator": {"zzz": 5}},
            "unknown key 'coordinator.zzz'; this section's keys are now engines.offload_activations_bytes",
        ),
        (
            {"run_dir": "x", "guard": {"watch_iterations": 5}, "life": {"watch_iterations": 5}},
            "'guard.watch_iterations' is the old name of 'life.watch_iterations', and both are given",
        ),
        ({"run_dir": "x", "guard": {"watch_iterations": 5}, "life": 3}, "'life' = 3"),
        ({"run_dir": "x", "experts": {"memory": "saved"}}, "experts.memory 'saved' was removed: memory.inter"),
        ({"run_dir": "x", "experts": {"memory": "overlapped"}}, "experts.memory 'overlapped' was removed"),
        ({"run_dir": "x", "experts": {"stale": "predict"}}, "experts.stale 'predict' was removed: predicted experts"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        CPSRConfig.load(settings)
    assert message in str(refused.value)


def test_the_one_value_of_a_removed_key_that_still_holds_is_accepted(caplog: pytest.LogCaptureFixture) -> None:
    found = CPSRConfig.load({"run_dir": "x", "experts": {"memory": "all", "policy": "sequential"}})
    assert found == CPSRConfig.load({"run_dir": "x", "experts": {"policy": "sequential"}})
    assert "experts.memory was removed, delete it" in caplog.text


@pytest.mark.parametrize("base", ["checkpoint", "line", None])
def test_the_removed_base_of_a_prediction_has_no_effect_and_is_named(
    base: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    found = CPSRConfig.load({"run_dir": "x", "predictor": {"base": base, "gain": 2.0}})
    assert found == CPSRConfig.load({"run_dir": "x", "predictor": {"gain": 2.0}})
    assert "predictor.base was removed, delete it from the configuration: a prediction begins at" in caplog.text


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        CPSRConfig.load(tmp_path / "absent.yaml")
    (tmp_path / "torn.json").write_text('{"run_dir": ')
    with pytest.raises(ConfigError, match="not valid JSON"):
        CPSRConfig.load(tmp_path / "torn.json")


def test_every_tunable_is_described() -> None:
    def fields(model: Any, path: str = "") -> Any:
        for name, field in model.model_fields.items():
            nested = getattr(field.annotation, "model_fields", None)
            if nested is None:
                yield path + name, field.description
            else:
                yield from fields(field.annotation, f"{path}{name}.")

    assert [name for name, description in fields(CPSRConfig) if not description] == []


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_key_of_the_version_before_is_accepted_with_a_warning(old: str, new: str) -> None:
    value = OTHER_THAN_DEFAULT[new]
    expected = CPSRConfig.load(settings_of(new, value))
    with pytest.warns(FutureWarning, match=f"^configuration: '{old}' is now called '{new}'"):
        assert CPSRConfig.load(settings_of(old, value)) == expected
    assert expected != CPSRConfig.load({"run_dir": "x"})


def test_only_rank_0_warns_of_an_old_key(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    monkeypatch.setenv("RANK", "1")
    assert CPSRConfig.load(settings_of("guard.watch_iterations", 5)).life.watch_iterations == 5
    assert not recwarn.list


def test_a_renamed_key_leaves_the_mapping_of_the_user_alone() -> None:
    settings = {"run_dir": "x", "guard": {"watch_iterations": 5}, "life": {"watch_tolerance_nats": 1.0}}
    with pytest.warns(FutureWarning):
        loaded = CPSRConfig.load(settings)
    assert (loaded.life.watch_iterations, loaded.life.watch_tolerance_nats) == (5, 1.0)
    assert settings == {"run_dir": "x", "guard": {"watch_iterations": 5}, "life": {"watch_tolerance_nats": 1.0}}


def test_an_empty_section_of_the_version_before_is_nothing() -> None:
    assert CPSRConfig.load({"run_dir": "x", "guard": {}}) == CPSRConfig.load({"run_dir": "x"})


def test_every_section_is_a_room() -> None:
    rooms = set(re.findall(r"`(\w+)`", ARCHITECTURE.read_text(encoding="utf-8")))
    assert CPSRConfig.model_fields.keys() - {"run_dir", "mode"} <= rooms
