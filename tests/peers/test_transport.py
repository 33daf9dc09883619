"""Messages and bytes between two real gloo ranks."""

from pathlib import Path

from tests.peers.ranks import run

TALK = """
import threading
from cpsr.checkpoint.memory_states import memory_state
from cpsr.peers.transport import Channel, Kind, Message, erase, problem_of, receive_state, sealed, send_state
states = States(memory, rank, elements=5000, slots=1)
pair = SideGroup(group_name(), [0, 1], 5.0)
transport.CHUNK_BYTES = 5000
channel, stop = Channel(pair, 1 - rank, 5.0), threading.Event()
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
