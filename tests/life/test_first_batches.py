"""A warning goes to ranks that are dealt the same batches, and to no others."""

from pathlib import Path

from tests.two_ranks import run

SCRIPT = """
import json, os, sys, threading
import torch
from cpsr import TorchAdapter
from cpsr.life.first_batches import FirstBatches
from cpsr.ranks.group import Group

rank = int(os.environ["RANK"])
torch.distributed.init_process_group("gloo")
module = torch.nn.Linear(2, 1)

class Parallel(TorchAdapter):
    @property
    def data_parallel_ranks(self):
        return [self.rank]

class Raising(dict):
    def values(self):
        raise KeyError("of the user's")

def reports(batches, kind=TorchAdapter, per_step=1, predicts=False):
    kinds = []
    adapter = kind(module, torch.optim.SGD(module.parameters(), lr=0.1))
    first = FirstBatches(adapter, group, predicts, lambda kind, *rest: kinds.append(kind))
    for count, batch in enumerate(batches, 1):
        first.on_batch(batch)
        if count % per_step == 0:
            first.after_step()
    return kinds

def threaded(predicts=False):
    kinds = []
    adapter = TorchAdapter(module, torch.optim.SGD(module.parameters(), lr=0.1))
    first = FirstBatches(adapter, group, predicts, lambda kind, *rest: kinds.append(kind))
    def deal():
        first.on_batch(torch.rand(3) + rank)
    for _ in range(6):
        thread = threading.Thread(target=deal)
        thread.start()
        thread.join()
        first.after_step()
    return kinds

def at_checkpoint(drawn, predicts=False, before=0):
    kinds = []
    adapter = TorchAdapter(module, torch.optim.SGD(module.parameters(), lr=0.1))
    first = FirstBatches(adapter, group, predicts, lambda kind, *rest: kinds.append(kind))
    for _ in range(before):
        first.after_step()
    for _ in range(drawn):
        first.on_batch(torch.rand(3) + rank)
    for _ in range(2):
        first.at_checkpoint()
    return kinds

def uneven(counts, predicts=True):
    kinds = []
    adapter = TorchAdapter(module, torch.optim.SGD(module.parameters(), lr=0.1))
    first = FirstBatches(adapter, group, predicts, lambda kind, *rest: kinds.append(kind))
    for count in counts:
        for _ in range(count):
            first.on_batch(torch.rand(3) + rank)
        first.after_step()
    return kinds

def drawn(seed, count=6):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(3, generator=generator) for _ in range(count)]

group = Group()
same, own = drawn(0), drawn(rank)
half = [one.bfloat16() for one in same]
found = {
    "same": reports(same),
    "uneven": uneven([1, 2, 3]),
    "uneven exact": uneven([1, 2, 3], predicts=False),
    "one more at first": uneven([2, 1, 1]),
    "own": reports(own),
    "same in structures": reports([{"x": (half[i], same[i].numpy()), "id": [str(i)]} for i in range(6)]),
    "own in one place": reports([{"x": same[i], "y": [own[i]]} for i in range(6)]),
    "constant": reports([torch.ones(3)] * 6),
    "two of three alike": reports([same[0], same[1], same[0], same[3]]),
    "tensor parallel": reports(same, Parallel),
    "opaque": reports([object()] * 6),
    "nested": reports([torch.nested.nested_tensor([one, one[:2]]) for one in same]),
    "conjugated": reports([torch.complex(one, one).conj() for one in same]),
    "without data": reports([one.to("meta") for one in same]),
    "raises": reports([Raising()] * 6),
    "another thread": threaded(),
    "another thread, predicts": threaded(predicts=True),
    "none from resume": at_checkpoint(0),
    "none from resume, predicts": at_checkpoint(0, predicts=True),
    "some from resume": at_checkpoint(1),
    "steps before": at_checkpoint(1, before=2),
    "steps before, predicts": at_checkpoint(1, before=2, predicts=True),
    "none": reports([]) + reports([torch.empty(0)] * 6),
    "two a step": reports(own, per_step=2, predicts=True),
    "two a step, exact": reports(own, per_step=2),
    "one a step": reports(own, predicts=True),
}
open(f"{sys.argv[1]}.{rank}", "w").write(json.dumps(found))
group.close()
torch.distributed.destroy_process_group()
"""


def test_only_ranks_that_are_dealt_the_same_are_reported(tmp_path: Path) -> None:
    found, other = run(SCRIPT, tmp_path)
    expected = {name: list[str]() for name in found} | {
        "same": ["same batches"],
        "same in structures": ["same batches"],
        "conjugated": ["same batches"],
        "steps before": ["no batches from resume"],
        "none from resume": ["no batches from resume"],
        "another thread": ["batches ahead"],
        "two a step": ["batches per step"],
        "uneven": ["batches per step"],
    }
    assert found == expected
    assert not any(other.values())
