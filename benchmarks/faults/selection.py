"""Which parts of the campaign a call asks for, and how many faults of each."""

from dataclasses import dataclass

from cpsr.benchmarks.faults.campaign import PARTS
from cpsr.benchmarks.faults.outcome import Outcome
from cpsr.benchmarks.faults.scenarios import FIXED, REPLAYED, Scenario, chosen
from cpsr.errors import ConfigError

__all__ = ["AT_LEAST", "LIVE", "SAMPLED_JOBS", "Selection", "parts_asked_for", "select"]

READS_EVERY = 5  # hundreds of calls read the same few files, for each of the errors
LIVE = "live"
REPLAY = "replay"
SPARSE = "sparse"
# With so many faults of each part every change is tested.
SAMPLED, SAMPLED_KILLS = 2, 3
# Parts of many faults that are alike, or of few: every so many.
SAMPLE = {"environments": 1, "damage": 120, "sparse damage": 240, "resharded restart: EIO": 80}
# At one stage, since each is compared with a quiet job of its own; tests/recovery and tests/replay kill in other ways.
SAMPLED_JOBS = ("killed while the other dumps", "a machine lost with its memory")
# Calls of each kind that a part meets at the least: none of them can become fewer without notice.
AT_LEAST = {
    "kill: save and commit": 32,
    "kill: save of another rank": 22,
    "kill: save of both ranks": 55,
    "kill: save again": 32,
    "kill: retention": 75,
    "kill: roll-back": 11,
    "kill: setting aside": 2,  # a directory gets another name, which says all
    "kill: restart": 10,
    "kill: saves with frozen weights": 70,
    "kill: sparse chain": 190,
    "kill: sparse save of both ranks": 80,
    "kill: sparse roll-back": 16,
    "kill: sparse restart": 14,
    "error: ENOSPC": 28,
    "error: ENOSPC from there on": 8,
    "error: EIO": 32,
    "error: EIO and retention": 60,
    "error: EIO from there on": 32,
    "error: EINTR": 23,
    "error: EINTR of a read": 70,
    "error: EROFS from there on": 16,
    "error: EIO of a read": 85,
    "error: half of a write lost": 6,
    "error: a write lost": 6,
    "error: fsync does nothing": 10,
    "restart: EIO": 66,
    "restart: EMFILE": 26,
    "restart: EINTR": 66,
    "sparse error: ENOSPC": 38,
    "sparse error: EIO and retention": 66,
    "sparse error: EIO from there on": 42,
    "sparse error: EIO of a read": 70,
    "sparse error: fsync does nothing": 12,
    "sparse restart: EIO": 76,
    "damage": 1500,
    "sparse damage": 2500,
}


@dataclass(frozen=True)
class Selection:
    """What a call injects.

    Attributes:
        parts: of the store's campaign, and of which only every so many faults.
        scenarios: of live jobs, with windows or without.
    """

    parts: dict[str, int]
    scenarios: tuple[Scenario, ...]

    def missing(self, outcomes: list[Outcome]) -> list[str]:
        """Scenarios that met fewer calls than they have to."""
        tried = {
            name: sum(outcome.scenario == name or outcome.scenario.startswith(_kinds(name)) for outcome in outcomes)
            for name in self.parts
        }
        return [
            f"{name}: {tried[name]} faults, of at least {AT_LEAST[name] // every}"
            for name, every in self.parts.items()
            if name in AT_LEAST and tried[name] < AT_LEAST[name] // every
        ]


def select(only: str = "", seed: int = 0, *, sample: bool = False) -> Selection:
    """What a call asks for.

    Args:
        only: words, comma-separated, see `parts_asked_for`.
        seed: the scenarios of live jobs are drawn with it.
        sample: of these parts what every change is tested with.

    Raises:
        ConfigError: a word names no part.
    """
    names = parts_asked_for(only)
    stored = [name for name in names if name not in (LIVE, REPLAY)]
    if sample:
        scenarios = [scenario for scenario in (FIXED if LIVE in names else ()) if scenario.name in SAMPLED_JOBS]
        parts = {name: _sampled(name) for name in stored if name in AT_LEAST or name in SAMPLE}
    else:
        scenarios = [*(chosen(seed) if LIVE in names else ()), *(REPLAYED if REPLAY in names else ())]
        parts = {name: _stride(name) for name in stored}
    return Selection(parts, tuple(scenarios))


def parts_asked_for(only: str) -> list[str]:
    """Names of parts, in the order in which they run.

    Args:
        only: words, comma-separated; empty for all. A word is a part's name, or how names begin up to their colon.
            `live` is live jobs, `replay` such with windows, and `sparse` stands for all parts with sparse checkpoints.

    Raises:
        ConfigError: a word names no part.
    """
    known = [*PARTS, LIVE, REPLAY]
    words = [word.strip() for word in only.split(",")] if only else []
    for word in words:
        if not any(_means(word, name) for name in known):
            raise ConfigError(f"no part of the campaign is called {word!r}; there are {', '.join([*known, SPARSE])}")
    return [name for name in known if not words or any(_means(word, name) for word in words)]


def _kinds(name: str) -> tuple[str, str]:
    """How the scenarios of a part begin that has several."""
    return f"{name}: ", f"{name.replace('damage', 'exchange')}: "


def _means(word: str, name: str) -> bool:
    return name == word or name.startswith(f"{word}:") or (word == SPARSE and SPARSE in name)


def _sampled(name: str) -> int:
    if name in SAMPLE:
        return SAMPLE[name]
    return max(1, AT_LEAST[name] // (SAMPLED_KILLS if name.startswith("kill: ") else SAMPLED))


def _stride(name: str) -> int:
    return READS_EVERY if "restart: " in name or name.endswith("of a read") else 1
