"""The random states that DeepSpeed keeps beside torch's generators."""

from pathlib import Path

from tests import two_ranks

SCRIPT = """
import json, os, sys
import torch
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker
from cpsr.engines.deepspeed_loop import load_tracked_states, preserved_tracked_states, tracked_states
from cpsr.state.codec import decode, encode

tracker = get_cuda_rng_tracker()

def draw(name):
    with tracker.fork(name):
        return float(torch.rand(()))

def draws():
    return [draw("one"), draw("two"), draw("one")]

assert (tracked_states(), load_tracked_states({})) == ({}, None)
tracker.add("one", 1)
tracker.add("two", 2)
draws()
saved = decode(*encode(tracked_states()))
before = torch.get_rng_state()
expected = [draws(), draws()]
assert load_tracked_states(saved) is None
assert [draws(), draws()] == expected
assert torch.equal(torch.get_rng_state(), before)

load_tracked_states(saved)
with preserved_tracked_states():
    draws()
assert draws() == expected[0]

notes = []
tracker.reset()
notes.append(load_tracked_states(saved))
tracker.add("one", 1)  # the script's own, which must find no state there yet
tracker.add("three", 3)
third = tracked_states()["three"]
notes.append(load_tracked_states({**saved, "one": torch.zeros(16, dtype=torch.uint8)}))
notes.append(load_tracked_states(saved))
assert draw("one") == expected[0][0]
assert torch.equal(tracked_states()["three"], third)
notes.append(load_tracked_states({}))
json.dump(notes, open(f"{sys.argv[1]}.{os.environ['RANK']}", "w"))
"""


def test_states_of_the_tracker_come_back_by_name(tmp_path: Path) -> None:
    notes, _ = two_ranks.run(SCRIPT, tmp_path)
    beginning = "of DeepSpeed's random-state tracker "
    assert [note.split(":")[0].removeprefix(beginning) for note in notes] == [
        "nothing is restored, and ['one', 'two'] is not",
        "nothing is restored, and ['one', 'three', 'two'] is not",
        "['one'] is restored, and ['three', 'two'] is not",
        "nothing is restored, and ['one', 'three'] is not",
    ]
