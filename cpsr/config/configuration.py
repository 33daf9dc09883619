"""The whole configuration, read from where users keep it.

A configuration is a YAML file, a mapping, or the `"cpsr"` block of the DeepSpeed JSON. Unknown keys are refused by
name, with the nearest valid one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from cpsr.config.experts import ExpertsConfig
from cpsr.config.reading import read_file, validated
from cpsr.config.sections import (
    CheckpointConfig,
    ElasticConfig,
    EnginesConfig,
    LearningConfig,
    MemoryConfig,
    PeersConfig,
    PlannerConfig,
    PredictorConfig,
    RanksConfig,
    ReplayConfig,
    RestartConfig,
    Section,
    ServiceConfig,
)

__all__ = ["CPSRConfig"]


class CPSRConfig(Section):
    """The whole configuration: every key with its unit, bounds and default is in docs/configuration.md.

    >>> CPSRConfig.load({"run_dir": "runs/gpt", "checkpoint": {"interval_iterations": 50}}).mode
    'auto'
    """

    run_dir: Path = Field(strict=False, description="Directory of this run; on storage that every rank shares.")
    mode: Literal["auto", "predict", "exact"] = Field(
        default="auto",
        description="auto: the cheapest feasible source; predict: restart near the failure; exact: recompute from c.",
    )
    checkpoint: CheckpointConfig = CheckpointConfig()
    memory: MemoryConfig = MemoryConfig()
    replay: ReplayConfig = ReplayConfig()
    planner: PlannerConfig = PlannerConfig()
    predictor: PredictorConfig = PredictorConfig()
    learning: LearningConfig = LearningConfig()
    restart: RestartConfig = RestartConfig()
    engines: EnginesConfig = EnginesConfig()
    elastic: ElasticConfig = ElasticConfig()
    experts: ExpertsConfig = ExpertsConfig()
    ranks: RanksConfig = RanksConfig()
    peers: PeersConfig = PeersConfig()
    service: ServiceConfig = ServiceConfig()

    @classmethod
    def load(cls, source: "CPSRConfig | Mapping[str, Any] | str | Path") -> "CPSRConfig":
        """Read a configuration from a YAML or JSON file, or from a mapping.

        A file or mapping with a top-level `cpsr` key (the DeepSpeed JSON) is read from that block.

        Raises:
            ConfigError: the file is absent or not readable, a key is unknown or a value does not fit; the message
                names the key and, for an unknown one, the nearest valid key.
        """
        if isinstance(source, CPSRConfig):
            return source
        where, data = ("configuration", source) if isinstance(source, Mapping) else read_file(Path(source))
        if "cpsr" in data:
            data = data["cpsr"]
            where += ", block 'cpsr'"
        return validated(cls, where, data)
