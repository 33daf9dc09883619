"""One rank of a conformance job: runs a group of cases and writes how each went."""

import gc
import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch

from cpsr.qualify.worker import own_process_globals
from tests.device import ON_CUDA
from tests.engines.groups import GROUPS, LACKING

COLLECTIVE_TIMEOUT = timedelta(seconds=60)  # a peer that failed is noticed well before pytest gives up


def main(group: str, folder: Path, rank: int, ranks: int) -> None:
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it builds a kernel for 70 s
    # DeepSpeed asks for fast fp16 instructions; torch computes fp16 correctly without them, only slower.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    torch.distributed.distributed_c10d.default_pg_timeout = COLLECTIVE_TIMEOUT
    meeting: dict[str, Any] = {
        "timeout": COLLECTIVE_TIMEOUT,
        "init_method": f"file://{folder / 'meeting'}",
        "rank": rank,
        "world_size": ranks,
    }
    if ON_CUDA:  # by torch, and not by DeepSpeed, which binds the group to the GPU: gloo cannot split one that is bound
        torch.distributed.init_process_group("gloo", **meeting)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, **meeting)
    results: dict[str, dict[str, object]] = {}
    for name, case in GROUPS[group].items():
        if name in LACKING:
            continue
        start, error = time.perf_counter(), ""
        try:
            with own_process_globals():
                case()
        except Exception:  # noqa: BLE001 - the traceback is the result
            error = traceback.format_exc()
        results[name] = {"error": error, "seconds": time.perf_counter() - start}
        (folder / f"{rank}.json").write_text(json.dumps(results))
        if error:  # the other rank may be anywhere in this case: no later one can be trusted
            sys.stderr.write(error)
            sys.stderr.flush()
            os._exit(1)
        gc.collect()
    torch.distributed.barrier()
    os._exit(0)  # DeepSpeed's destructors are not what is tested
