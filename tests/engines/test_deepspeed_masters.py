"""The order in which ZeRO-3 gets the masters' values, where the device is behind the host."""

from pathlib import Path
from typing import Any

import pytest

from tests import two_ranks

SCRIPT = """
import json, os, sys
import deepspeed, torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)

from deepspeed.runtime.zero import partition_parameters
from cpsr.qualify.conformance import seed
from cpsr.qualify.deepspeed_jobs import DeepSpeedJob, configuration, initialize
from cpsr.qualify.torch_jobs import TinyLM, token_batch

seed(1)
config = configuration(3, "bf16")
config["zero_optimization"]["stage3_param_persistence_threshold"] = THRESHOLD
job = DeepSpeedJob(initialize(TinyLM(), config))
job.train_step(0)
optimizer, trace = job.engine.optimizer, []

def recorded(owner, name, note):
    original = getattr(owner, name)
    def call(*given, **more):
        result = original(*given, **more)
        trace.append(note(*given, **more))
        return result
    setattr(owner, name, call)

recorded(optimizer, "_reassign_or_swap_out_partitioned_parameters", lambda group: "copied")
recorded(partition_parameters, "_dist_allgather_fn", lambda *given: "gathered")
for parameter in optimizer.persistent_parameters[:1]:
    recorded(parameter, "all_gather", lambda *given: "gathered persistent")
recorded(deepspeed.accelerator.get_accelerator(), "synchronize", lambda device=None: f"synchronized {device}")

job.adapter.device = torch.device("cuda", 1)
job.adapter.push_down()
pushed = list(trace)
job.adapter.device = torch.device("cpu")
del trace[:]
tokens, targets = token_batch(1, 0, job.adapter.rank)
with job.adapter.evaluation():
    job.adapter.evaluate((tokens,), {"targets": targets})
json.dump([pushed, sorted(set(trace))], open(f"{sys.argv[1]}.{os.environ['RANK']}", "w"))
torch.distributed.barrier()
os._exit(0)
"""


@pytest.mark.parametrize(("threshold", "persistent"), [(0, []), (10**6, ["gathered persistent"])])
def test_what_is_copied_into_partitions_is_there_before_they_are_gathered(
    tmp_path: Path, threshold: int, persistent: list[str]
) -> None:
    found: tuple[Any, Any] = two_ranks.run(SCRIPT.replace("THRESHOLD", str(threshold)), tmp_path)
    for pushed, evaluated in found:
        copies = pushed.count("copied")
        assert copies > 0
        assert pushed == ["copied"] * copies + persistent + ["synchronized 1"]
        assert ("gathered" in evaluated) == (not persistent)
        assert not any(one.startswith("synchronized") for one in evaluated)
