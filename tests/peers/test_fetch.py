"""What another machine holds is brought to the rank that needs it, between real processes."""

import shutil
from pathlib import Path

import pytest

from tests.peers.ranks import run

# Rank 2 has taken the place of a rank whose machine was lost; its state lies at the machines of ranks 0 and 1.
LOST = """
states = States(memory, rank, slots=2)
if rank != 2:
    states.seal(10), states.seal(20)
    replicas = States(memory, 2, slots=1)
    lying, _ = replicas.seal(20)
    replica = lying.with_name(f"cpsr-{RUN_ID}-rank-00002-replica-{rank:05d}-0")
    lying.rename(replica)
group.barrier()
nodes = group.gather(this_node())
entries = [Entry(s.rank, s.iteration, s.kind, this_node(), s.path.name) for s in Arena(RUN_ID, memory).list()]
entries = [Entry(**one) for part in group.gather([vars(entry) for entry in entries]) for one in part]
sources = decide(nodes, entries, None, None, alike=range(group.size)).exact
own = [source for source in sources if source.rank != 2]
fetched = fetch(Arena(RUN_ID, memory), group, nodes, sources)
found["right"] = [[s.iteration, is_right(s), oct(s.path.stat().st_mode & 0o777)] for s in fetched.values()]
for state in fetched.values():
    state.path.unlink()
found["nothing"] = fetch(Arena(RUN_ID, memory), group, nodes, own)

def fails():
    try:
        fetch(Arena(RUN_ID, memory), group, nodes, sources)
    except CheckpointError as error:
        return str(error).replace(str(root), "")
if rank == 0:
    with replica.open("r+b") as file:
        file.seek(600_000)
        file.write(b"damage")
found["damaged"] = fails()
if rank == 0:
    replica.unlink()
found["gone"] = fails()
found["left"] = len(list(memory.glob("*fetched*")))
leave()
"""


def test_a_lost_rank_gets_its_state_from_the_machine_that_holds_it(tmp_path: Path) -> None:
    ranks = run(LOST, tmp_path, ["a", "b", "c"])
    assert [found["right"] for found in ranks] == [[], [], [[20, True, "0o600"]]]
    for found in ranks:
        assert found["nothing"] == {}
        # All say the same, so that all choose another source.
        assert found["damaged"] == ranks[0]["damaged"]
        assert "rank 2, cpsr-0123abcd-rank-00002-replica-00000-0 from a: " in found["damaged"]
        assert "its hash does not hold" in found["damaged"]
        assert "rank 2, cpsr-0123abcd-rank-00002-replica-00000-0 from a: rank 0: " in found["gone"]
        assert "does not hold iteration 20 any more" in found["gone"]
        assert found["left"] == 0


LIFE = """
states = States(memory, rank, alike=alike)
replicator = opened(states, replicas=2)
for iteration in (10, 20):
    replicator.offer(states.image(iteration))
    until(lambda: all(iteration in replicated(owner) for owner in replicator.placement.owners_kept_by(rank)))
    group.barrier()
os.kill(os.getpid(), signal.SIGKILL)
"""

RESTART = """
nodes = group.gather(this_node())
entries = [
    vars(Entry(s.rank, s.iteration, s.kind, this_node(), s.path.name, s.parts)) for s in Arena(RUN_ID, memory).list()
]
entries = [Entry(**one) for part in group.gather(entries) for one in part]
sources = decide(nodes, entries, None, None, alike=range(group.size)).exact
fetched = fetch(Arena(RUN_ID, memory), group, nodes, sources)
own = sources[rank].entries
*tensors, state = [fetched.get(entry) or describe(memory / entry.name) for entry in own]
right = is_right(state, *tensors, alike=alike)
found["state"] = [state.rank, state.iteration, right, [s.rank for s in tensors], [entry in fetched for entry in own]]
leave()
"""


@pytest.mark.parametrize("alike", [pytest.param(False, marks=pytest.mark.slow), True])
def test_every_state_is_left_after_a_sigkill_of_all_and_the_loss_of_any_two_of_three_machines(
    tmp_path: Path, alike: bool
) -> None:
    settings = f"alike = {alike}\n"
    run(settings + LIFE, tmp_path, ["a", "b", "c"], [-9, -9, -9])
    for kept in range(3):
        after = tmp_path / f"after-{kept}"
        shutil.copytree(tmp_path / "abc"[kept], after / "abc"[kept])
        nodes = ["abc"[rank] if rank == kept else f"new-{rank}" for rank in range(3)]
        for rank, found in enumerate(run(settings + RESTART, after, nodes)):
            lost = rank != kept
            # Where all own the same, the lost ones take it from the one that is left, and the rest from their own.
            tensors, brought = ([kept], [True, True]) if alike and lost else ([], [lost])
            assert found["state"] == [rank, 20, True, tensors, brought]
