"""Messages and bytes between two real gloo ranks; experts that did not change are sent to a holder once."""

from pathlib import Path

from tests.peers.ranks import run

TALK = """
import threading
from cpsr.checkpoint.memory_states import memory_state
from cpsr.peers.transport import Channel, Kind, Message, erase, problem_of, receive_state, sealed, send_state
states = States(memory, rank, elements=5000, slots=1)
pair = SideGroup(group_name(), [0, 1], 5.0)
channel, stop = Channel(pair, 1 - rank, 5000, 5.0), threading.Event()
def refused(action):
    try:
        action()
    except (CheckpointError, OSError) as error:
        return f"{type(error).__name__}: {error}".replace(str(root), "")
path, _ = states.seal(10)
state = sealed(path, 10)
target = memory / f"cpsr-{RUN_ID}-rank-00000-replica-00001-0"
if rank == 0:
    found["sent"] = send_state(channel, state, stop)
    erase(path)  # as a pool does that has taken the buffer for the next snapshot
    found["overwritten"] = send_state(channel, state, stop)
    states.seal(20)
    found["resealed"] = send_state(channel, state, stop)
    stop.set()
    found["stopped"] = send_state(channel, sealed(path, 20), stop)
    for words in ([9, 0, 0, 0, 0], [1, 0, 100, 50, 51], [1, 0, 100, -1, 5], [1, 0, 9999, 0, 5001]):
        pair.send(torch.tensor(words), 1).wait()
    try:
        send_state(channel, sealed(path, 20), threading.Event())
    except RuntimeError:
        found["given up"] = True  # by a rank that did not write it, and left
else:
    found["complete"] = receive_state(channel, channel.receive_unless(stop), target)
    found["problem"] = problem_of(target, 0, 10)
    found["another"] = problem_of(target, 0, 20).replace(str(root), "")
    found["right"] = is_right(memory_state(target), elements=5000)
    found["dropped"] = [channel.receive().kind.name for _ in range(3)]
    found["refused"] = [refused(channel.receive) for _ in range(4)]
    link = memory / "link"
    link.symlink_to(target)
    found["link"] = refused(lambda: receive_state(channel, channel.receive(), link))
    found["after the link"] = is_right(memory_state(target), elements=5000)
leave()
"""

NO_MEMORY = """
import cpsr.peers.transport as transport
from cpsr.peers.transport import Channel, receive_state, sealed, send_state
states = States(memory, rank, elements=5000, slots=1)
channel = Channel(SideGroup(group_name(), [0, 1], 5.0), 1 - rank, 5000, 5.0)
path, _ = states.seal(10)
if rank == 0:
    import threading
    try:
        send_state(channel, sealed(path, 10), threading.Event())
    except RuntimeError:
        pass  # by a rank that left
else:
    transport.available_host_bytes = lambda: 5000
    try:
        receive_state(channel, channel.receive(), memory / "target")
    except OSError as error:
        found["refused"] = error.strerror
    found["blocks"] = (memory / "target").stat().st_blocks
leave()
"""


def test_a_state_arrives_as_it_was_sent_or_not_at_all(tmp_path: Path) -> None:
    sender, receiver = run(TALK, tmp_path, ["a", "b"])
    assert sender == {
        "sent": True,
        "overwritten": False,
        "resealed": False,
        "stopped": False,
        "given up": True,
        "events": [],
    }
    assert receiver["complete"]
    assert receiver["problem"] is None
    assert receiver["another"].endswith("does not hold iteration 20 of rank 0")
    assert receiver["right"]
    assert receiver["dropped"] == ["DROPPED"] * 3
    assert all("CheckpointError: rank 0 sent no message of this version" in one for one in receiver["refused"])
    assert "symbolic links" in receiver["link"]
    assert receiver["after the link"]


def test_a_state_that_the_memory_does_not_hold_is_refused_before_it_is_taken(tmp_path: Path) -> None:
    _, receiver = run(NO_MEMORY, tmp_path, ["a", "b"])
    assert "bytes of memory are missing, 5000 are available" in receiver["refused"]
    assert receiver["blocks"] * 512 < 5000  # but for its first page


SPARSE = """
import threading
from cpsr.checkpoint.host_snapshot import Contents
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
