"""What ranks in the loops of other packages import beside, and takes seconds; imported to have it done."""

import gc
from contextlib import suppress
from importlib import import_module

import tests.preloaded  # noqa: F401 - for what it imports

for _module in ("accelerate", "transformers.trainer"):
    with suppress(ImportError):
        import_module(_module)

gc.freeze()  # no rank's garbage collector looks through all of this again
