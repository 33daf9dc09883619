"""Experts that did not change are sent to a holder once, between two real gloo ranks."""

from pathlib import Path

import pytest

from cpsr.peers.unchanged import FilePart, decoded, encoded
from tests.peers.ranks import run

SPARSE = """
import threading
from cpsr.checkpoint.contents import Contents
from cpsr.checkpoint.memory import SharedMemory
from cpsr.checkpoint.memory_reader import ages_in_memory
from cpsr.checkpoint.memory_states import memory_state
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.peers.transport import Channel, Kind, erase, problem_of, receive_state, sealed, send_state
from cpsr.state.shard import OperatorState, ParamSlice, Shard
EXPERTS = [f"expert.{index}" for index in range(4)]
def live(iteration):
    operators = {}
    for name in ["rest", *EXPERTS]:
        values = torch.full((10_000,), float(iteration))
        operators[name] = OperatorState(name, ParamSlice(values, (10_000,)), {"exp_avg": values + 1}, iteration)
    return Shard(operators)
SENT = [
    (1, EXPERTS), (2, EXPERTS[:1]), (3, EXPERTS[1:2]), (4, EXPERTS[2:3]), (5, EXPERTS[:2]),
    ("lost", EXPERTS[:1]), (7, EXPERTS[:1]), (8, EXPERTS[:1]),
]
pair = SideGroup(group_name(), [0, 1], 20.0)
channel, stop = Channel(pair, 1 - rank, 65536, 20.0), threading.Event()
slots = [memory / f"cpsr-{RUN_ID}-rank-00000-replica-00001-{slot}" for slot in (0, 1)]
found |= {"bytes": [], "problems": [], "ages": []}
if rank == 0:
    pool = SnapshotPool(live(0), memory=SharedMemory(RUN_ID, 0, 0, memory), units={name: name for name in EXPERTS})
    pool.sealing.on_sealed = lambda path, snapshot: found.__setitem__("path", str(path))
    send = Channel.send
    def counting(self, message):
        found["bytes"][-1] += message.length if message.kind is Kind.PIECE else 0
        send(self, message)
    Channel.send = counting
    for place, (_, copied) in enumerate(SENT, 1):
        left = frozenset(EXPERTS) - set(copied)
        contents = Contents(experts=frozenset(EXPERTS), carried=left, uncopied=left)
        snapshot = pool.begin(live(place), place, {"at": place}, contents, disk=False)
        pool.finish()
        pool.settle()
        pool.release(snapshot)
        found["bytes"].append(0)
        assert send_state(channel, sealed(Path(found["path"]), place), stop, offers=True)
    pool.close()
else:
    for place, (what, _) in enumerate(SENT, 1):
        target, newest = slots
        assert receive_state(channel, channel.receive(), target, newest)
        found["problems"].append(problem_of(target, 0, place))
        found["ages"].append(sorted(set(ages_in_memory(memory_state(target)).values())))
        slots.reverse()
        if what == "lost":
            for slot in slots:
                erase(slot)
leave()
"""


def test_what_the_holder_has_is_not_sent_again(tmp_path: Path) -> None:
    sender, receiver = run(SPARSE, tmp_path, ["a", "b"])
    assert receiver["problems"] == [None] * 8
    assert receiver["ages"] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 3, 4],
        [1, 4, 5],
        [1, 4, 5, 6],
        [1, 4, 5, 7],
        [1, 4, 5, 8],
    ]
    part = 2 * 4 * 10_000
    parts = [round(sent / part) for sent in sender["bytes"]]
    # The rest, and the experts that were copied. What was lost on the way is sent anew, from then on to both slots.
    assert parts == [5, 2, 2, 2, 3, 2, 5, 2]


def test_parts_travel_as_they_are() -> None:
    parts = [FilePart(4096, 8192, b"a" * 16), FilePart(8192, 1 << 40, bytes(range(16)))]
    assert decoded(encoded(parts)) == parts
    with pytest.raises(ValueError, match="no parts of a state"):
        decoded(encoded(parts)[:-1])
