"""Tokens that a failure would take from experts, snapshot after snapshot."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy

from cpsr.benchmarks.experts.policies import IN_TURN, POLICIES
from cpsr.benchmarks.experts.routing import Trace
from cpsr.experts.budget import Budget
from cpsr.experts.operators import Expert
from cpsr.experts.policy import Policy
from cpsr.experts.popularity import Popularity
from cpsr.experts.unsaved import UnsavedTokens

__all__ = ["SMALL_SNAPSHOT_SHARE", "SNAPSHOT_SHARE", "Exposure", "exposure", "tokens_at_risk"]

# Of the experts, one in so many is in a snapshot: moetion, section 4.1, "25% to 40%"; and fewer.
SNAPSHOT_SHARE, SMALL_SNAPSHOT_SHARE = 4, 16


@dataclass(frozen=True)
class Exposure:
    """One trace with a snapshot after every iteration, under every policy.

    Attributes:
        source: of the trace.
        skew: of the trace.
        experts_per_layer: in a snapshot.
        experts: that a layer has.
        at_risk: policy -> tokens at risk after each iteration's snapshot, in iterations' worth of tokens.
    """

    source: str
    skew: float
    experts_per_layer: int
    experts: int
    at_risk: Mapping[str, list[float]]

    @property
    def against_turn(self) -> dict[str, float]:
        """Policy -> mean tokens at risk over those where experts are saved in turn."""
        in_turn = float(numpy.mean(self.at_risk[IN_TURN]))
        return {name: float(numpy.mean(series)) / in_turn for name, series in self.at_risk.items() if name != IN_TURN}


def exposure(trace: Trace, experts_per_layer: int) -> Exposure:
    """Every policy on the same trace, with K experts of each layer on average in each snapshot."""
    at_risk = {
        name: tokens_at_risk(make(trace.layers()), trace, Budget(experts_per_layer=experts_per_layer))
        for name, make in POLICIES.items()
    }
    return Exposure(trace.source, trace.skew, experts_per_layer, trace.tokens.shape[2], at_risk)


def tokens_at_risk(policy: Policy, trace: Trace, budget: Budget) -> list[float]:
    """Unsaved tokens after the snapshot of each iteration, over the tokens that an iteration routes."""
    ledger, found = UnsavedTokens(trace.layers()), []
    routed = float(trace.tokens.sum(axis=(1, 2)).mean())
    for step, tokens in enumerate(trace.tokens):
        ledger.observe(list(tokens))
        popularity = Popularity(ledger.tokens, ledger.tokens, ledger.ages)
        chosen = policy.select(step, popularity, budget)
        ledger.saved(operator for operator in chosen if isinstance(operator, Expert))
        found.append(float(sum(layer.sum() for layer in ledger.tokens)) / routed)
    return found
