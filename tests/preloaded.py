"""What a rank of a small job imports or finds out before it trains, and takes seconds; imported to have it done."""

import gc
from importlib import import_module

import deepspeed

import tests.imported_later  # noqa: F401 - for what it imports

# What deepspeed.initialize imports.
for _module in ("deepspeed.runtime.zero.muon.original_muon", "cpsr.engines"):
    import_module(_module)

COMPATIBLE_OPS = deepspeed.ops.__compatible_ops__  # DeepSpeed compiles and links a program to find it out

gc.freeze()  # no rank's garbage collector looks through all of this again
