"""The configuration of a run: sections named after the rooms that they are for, and reading them from files."""

from cpsr.config.configuration import (
    CheckpointConfig,
    CPSRConfig,
    ElasticConfig,
    EnginesConfig,
    ExpertsConfig,
    RanksConfig,
    ServiceConfig,
)
from cpsr.config.reading import read_model

__all__ = [
    "CPSRConfig",
    "CheckpointConfig",
    "ElasticConfig",
    "EnginesConfig",
    "ExpertsConfig",
    "RanksConfig",
    "ServiceConfig",
    "read_model",
]
