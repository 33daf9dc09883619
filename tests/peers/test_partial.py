"""What a holder is sent of a mixture's snapshots."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy

from cpsr.checkpoint.arena import Sealed
from cpsr.checkpoint.host_snapshot import Contents
from cpsr.checkpoint.memory import SharedMemory
from cpsr.checkpoint.saved import operator_record
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.peers.partial import Sending
from tests.checkpoint.conftest import make_shard

NAMES = tuple(make_shard().operators)
EXPERTS = {NAMES[0]: "0", NAMES[2]: "1"}


class Experts:
    """Selects one of two."""

    units, period_seconds = EXPERTS, 1.0

    def held_tokens(self, iteration: int) -> Any:
        return numpy.full(2, float(iteration))

    def for_peers(self, step: int, unsent: Any, ages: Any, link_bytes: float, changed: Collection[str]) -> Any:
        return frozenset({"0"} & {*changed})

    def kept(self, sent: Any, tokens: Any, ages: Any, changed: Any) -> Any:
        return tokens[0], ages


def test_what_another_rank_of_the_machine_holds_is_not_sent(tmp_path: Path) -> None:
    live, memory = make_shard(), SharedMemory("run", 0, 1, tmp_path)
    pool = SnapshotPool(live, 3, memory, EXPERTS)
    replicated = {name: operator_record(one).described for name, one in live.operators.items()}
    contents = Contents(writers={NAMES[0]: 1}, replicated=replicated, left=frozenset({NAMES[0]}))
    assert pool.begin(live, 50, {"of": 0}, contents, disk=False) is not None
    pool.finish()
    pool.settle()
    (state,) = memory.arena.list()
    image = Sealed.at(state.path, 50)
    sent = sum(len(piece) for _, piece in image.pieces())
    assert image.size - sent >= live.operators[NAMES[0]].state_bytes
    replica = memory.path("replica-00001-0").name
    with memory.arena.put(replica, image) as arrived:
        assert arrived.state.lacking.keys() == {NAMES[0]}
        assert arrived.scalars() == {"of": 0}
    pool.close()


def test_no_replica_holds_an_expert_of_a_branch_that_the_run_has_left(tmp_path: Path) -> None:
    live, memory = make_shard(), SharedMemory("run", 0, 1, tmp_path)
    pool, sending = SnapshotPool(live, 3, memory, EXPERTS), Sending(Experts())  # type: ignore[arg-type] # a part of one
    replica = memory.path("replica-00001-0").name

    def ages_sent(iteration: int) -> set[int]:
        live.operators[NAMES[0]].parameter.values.add_(1.0)
        live.operators[NAMES[2]].parameter.values.add_(1.0)
        begun = pool.begin(live, iteration, {}, disk=False)
        assert begun is not None
        pool.finish()
        pool.settle()
        pool.release(begun)
        (state,) = [one for one in memory.arena.list() if (one.place, one.iteration) == ("own", iteration)]
        with memory.arena.put(replica, sending.image(replica, Sealed.at(state.path, iteration))) as arrived:
            sending.arrived(replica, 1.0)
            return {*arrived.state.ages.values()}

    assert [ages_sent(50), ages_sent(51)] == [{50}, {50, 51}]
    pool.forget_after(40)
    memory.branch += 1
    assert [ages_sent(52), ages_sent(53)] == [{52}, {52, 53}]
    pool.close()
