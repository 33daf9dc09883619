"""How much the expert benchmark measures."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from cpsr.benchmarks.experts.names import MODES, MOETION, STALE
from cpsr.benchmarks.experts.policies import CONFIGURED, IN_TURN
from cpsr.benchmarks.experts.tasks import Failures, Mixture
from cpsr.demo.model import GPTConfig
from cpsr.errors import ConfigError

__all__ = ["FULL", "QUICK", "Size", "require_known"]


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        seeds: runs of each model that fails.
        failing: models that fail.
        failures: when, and by which policies they are saved.
        stalling: models with a snapshot after every iteration.
        pairs: blocks with and without these, for each way to choose operators.
        writing: models whose ranks share out what they hold alike.
        rounds: checkpoints of these, by each way to share it out.
    """

    seeds: int
    failing: tuple[Mixture, ...]
    failures: Failures
    stalling: tuple[Mixture, ...]
    pairs: int
    writing: tuple[Mixture, ...]
    rounds: int

    def with_failing(
        self,
        seeds: int | None,
        batch_windows: int | None,
        policies: Collection[str] | None = None,
        modes: Collection[str] | None = None,
    ) -> "Size":
        """The same with other runs that fail.

        Args:
            seeds: of each model; None: as they are.
            batch_windows: of each of their iterations; None: as they are.
            policies: by which each is saved, as configurations name them; None: as they are.
            modes: what becomes of older experts, some of `MODES`, beside `STALE`, which is always measured; None: as
                they are.

        Raises:
            ConfigError: the ranks of a model cannot share so many windows equally; or a name is not known.
        """
        failing = self.failing
        if batch_windows is not None:
            uneven = [mixture.ranks for mixture in failing if batch_windows % mixture.ranks]
            if uneven:
                raise ConfigError(f"--batch-windows {batch_windows}: {uneven[0]} ranks must share them equally")
            failing = tuple(mixture.model_copy(update={"batch_windows": batch_windows}) for mixture in failing)
        chosen: dict[str, tuple[str, ...]] = {}
        if policies is not None:
            chosen["policies"] = _named("--policies", policies, CONFIGURED)
        if modes is not None:
            chosen["modes"] = tuple(dict.fromkeys((STALE, *_named("--modes", modes, MODES))))
        failures = self.failures.model_copy(update=chosen)
        return replace(self, seeds=self.seeds if seeds is None else seeds, failing=failing, failures=failures)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""

        def plain(value: Any) -> Any:
            if isinstance(value, BaseModel):
                return value.model_dump()
            return [plain(one) for one in value] if isinstance(value, tuple) else value

        return {name: plain(value) for name, value in vars(self).items()}


# Steps long enough that beginning a snapshot, which takes the same time whatever its size, is not all there is.
_WIDER = Mixture(expert_parallel=2, ranks=2, gpt=GPTConfig(layers=4, heads=4, width=128, context=128))
_LONGER = _WIDER.model_copy(update={"batch_windows": 16})
_SHARED = tuple(Mixture(experts_per_token=k, expert_parallel=ep, ranks=2) for k in (1, 2) for ep in (1, 2))
# Three layers of experts, of which two ranks cannot save equally many, and enough bytes that the disk decides.
_WRITTEN = tuple(
    Mixture(expert_parallel=ep, ranks=2, gpt=GPTConfig(layers=6, heads=4, width=256, context=64)) for ep in (1, 2)
)
QUICK = Size(
    seeds=4,
    failing=(Mixture(),),
    failures=Failures(),
    stalling=(_SHARED[1],),
    pairs=10,
    writing=(_WRITTEN[1],),
    rounds=10,
)
# With four times the tokens an iteration moves experts further and less at random, and what they miss is seen better.
FULL = Size(
    seeds=3,
    failing=(Mixture(batch_windows=32), Mixture(experts_per_token=2), _SHARED[1]),
    failures=Failures(policies=(IN_TURN, MOETION)),
    stalling=(*_SHARED, _WIDER, _LONGER),
    pairs=20,
    writing=_WRITTEN,
    rounds=20,
)


def _named(option: str, asked: Collection[str], labels: Mapping[str, str]) -> tuple[str, ...]:
    """What the names stand for, each once and always in the same order: the same choice is the same task."""
    require_known(option, asked, labels)
    return tuple(label for name, label in labels.items() if name in asked)


def require_known(option: str, asked: Collection[str], known: Collection[str]) -> None:
    """Raise ConfigError where an option names something else, or nothing."""
    unknown = sorted(set(asked) - set(known))
    if unknown or not asked:
        raise ConfigError(f"{option} {', '.join(unknown) or 'is empty'}: there are {', '.join(known)}")
