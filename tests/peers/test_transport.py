"""A slab on its way between two real gloo ranks."""

from pathlib import Path

from tests.peers.ranks import run

TALK = """
import threading
from cpsr.peers.transport import Kind, Message
states = States(memory, rank, elements=5000, slots=1)
pair = SideGroup(group_name(), [0, 1], 5.0)
arena_module.PIECE_BYTES = 5000
channel, stop = Channel(pair, 1 - rank, 5.0, serves=rank == 1), threading.Event()
name = f"cpsr-{RUN_ID}-rank-00000-replica-00001-0"
arena = arena_module.Arena(RUN_ID, memory)
peer = Peer(channel, arena, rank, stop)
def refused(action):
    try:
        action()
    except (CheckpointError, OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}".replace(str(root), "")
def serve(requests=1):
    for _ in range(requests):
        answer(channel, arena, channel.receive_unless(stop))
path, _ = states.seal(10)
if rank == 0:
    state = arena_module.Sealed.at(path, 10)
    peer.put(name, state)
    found["list"] = [[one.name, one.rank, one.iteration, one.kind, one.life] for one in peer.list(0)]
    states.seal(20)
    found["resealed"] = refused(lambda: peer.put(name, state))
    stop.set()
    found["stopped"] = refused(lambda: peer.put(name, arena.image(path.name, 20)))
    stop.clear()
    found["link"] = refused(lambda: peer.put(name, arena.image(path.name, 20)))
    for name in ("../elsewhere", f"cpsr-other-rank-00000-replica-00001-0"):
        found[name] = refused(lambda: peer.put(name, arena.image(path.name, 20)))
    for words in ([19, 0, 0], [5, -1, 0], [6, 0, (4 << 20) + 1]):
        pair.send(torch.tensor(words), 1).wait()
    found["given up"] = refused(lambda: peer.put(name, arena.image(path.name, 20)))
else:
    serve()
    found["right"] = is_right(arena.find(name, 10), elements=5000)
    serve(3)
    found["kept"] = [one.name for one in arena.list(0)]
    other = memory / "other"
    other.write_bytes(b"precious")
    (memory / name).symlink_to(other)
    serve()
    found["after the link"] = other.read_text()
    serve(2)
    found["files"] = len(list(root.iterdir()))
    found["refused"] = [refused(channel.receive) for _ in range(3)]
leave()
"""


def test_a_state_arrives_as_it_was_sent_or_not_at_all(tmp_path: Path) -> None:
    sender, receiver = run(TALK, tmp_path, ["a", "b"])
    name = "cpsr-0123abcd-rank-00000-replica-00001-0"
    assert sender["list"] == [[name, 0, 10, "snapshot", 0]]
    assert receiver["right"]
    assert receiver["kept"] == []
    assert "was overwritten before it was sent whole" in sender["resealed"]
    assert sender["stopped"] == "CheckpointError: this rank ends"
    assert "rank 1: [Errno 40]" in sender["link"]
    assert receiver["after the link"] == "precious"
    for foreign in ("../elsewhere", "cpsr-other-rank-00000-replica-00001-0"):
        assert f"rank 1: '{foreign}' is no slab of the run 0123abcd" in sender[foreign]
    assert receiver["files"] == 2
    assert all("RuntimeError: rank 0 sent no message of this version" in one for one in receiver["refused"])
    assert sender["given up"], "by a rank that did not take it, and left"
