"""One rank of a conformance job: runs a group of cases and writes how each went.

`python worker.py GROUP RESULT_FILE [CASE...]` with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment.
"""

import gc
import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import deepspeed
import torch

from tests.engines.groups import GROUPS

COLLECTIVE_TIMEOUT = timedelta(seconds=60)  # a peer that failed is noticed well before pytest gives up


def main(group: str, result_file: str, *wanted: str) -> None:
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it builds a kernel for 70 s
    # DeepSpeed asks for fast fp16 instructions; torch computes fp16 correctly without them, only slower.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    torch.distributed.distributed_c10d.default_pg_timeout = COLLECTIVE_TIMEOUT
    deepspeed.init_distributed("gloo", timeout=COLLECTIVE_TIMEOUT)
    results: dict[str, dict[str, object]] = {}
    for name, case in GROUPS[group].items():
        if wanted and name not in wanted:
            continue
        start, error = time.perf_counter(), ""
        try:
            case()
        except Exception:  # noqa: BLE001 - the traceback is the result
            error = traceback.format_exc()
        results[name] = {"error": error, "seconds": time.perf_counter() - start}
        Path(result_file).write_text(json.dumps(results))
        if error:  # the other rank may be anywhere in this case: no later one can be trusted
            sys.stderr.write(error)
            sys.stderr.flush()
            os._exit(1)
        gc.collect()
    torch.distributed.barrier()
    os._exit(0)  # DeepSpeed's destructors are not what is tested


if __name__ == "__main__":
    main(*sys.argv[1:])
