"""Configurations are read from where users keep them, and refused by key."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cpsr.config import CPSRConfig
from cpsr.errors import ConfigError

ARCHITECTURE = Path(__file__).parents[1] / "ARCHITECTURE.md"


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
        ({"run_dir": "x", "memory": 3}, "'memory' = 3"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        CPSRConfig.load(settings)
    assert message in str(refused.value)


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


def test_every_section_is_a_room() -> None:
    rooms = set(re.findall(r"`(\w+)`", ARCHITECTURE.read_text(encoding="utf-8")))
    assert CPSRConfig.model_fields.keys() - {"run_dir", "mode"} <= rooms
