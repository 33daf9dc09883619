"""What workers are given to do in tests; imports little, since every one of them imports it."""

import os
import time
from pathlib import Path

from cpsr.errors import CPSRError


def square(number: int) -> int:
    if number == 2:
        raise CPSRError("two")
    if number == 0:
        os._exit(1)
    return number * number


def wait(path: Path) -> None:
    path.write_text(str(os.getpid()))
    time.sleep(60)
