"""The conformance cases of two ranks; those of one group run in one job, one after the other."""

from tests.engines.deepspeed_cases import OTHER, ZERO, Case
from tests.engines.fused_adam_cases import FUSED
from tests.engines.mixture_cases import MIXTURES
from tests.engines.saving_cases import SAVING

__all__ = ["GROUPS"]

GROUPS: dict[str, dict[str, Case]] = {"zero": ZERO, "other": OTHER, "fused": FUSED, "mixtures": MIXTURES | SAVING}
