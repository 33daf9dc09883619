"""A thread receives signals, and an earlier receiver still gets them."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator

import pytest

from cpsr.ranks.emergency_dump import Wakeup


@pytest.fixture(autouse=True)
def handled() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_an_event_loop_goes_on_to_hear() -> None:
    async def hear() -> bool:
        received = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, received.set)
        wakeup = Wakeup()
        thread = threading.Thread(target=wakeup.wait, args=(5.0,))
        thread.start()
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.wait_for(received.wait(), 5.0)
        thread.join()
        wakeup.close()
        received.clear()
        os.kill(os.getpid(), signal.SIGUSR1)  # given back
        await asyncio.wait_for(received.wait(), 5.0)
        return True

    assert asyncio.run(hear())


FORKS = textwrap.dedent(
    """
    import os, signal
    from cpsr.ranks.emergency_dump import Wakeup
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    wakeup = Wakeup()
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGUSR1)
        os._exit(0)
    os.waitpid(child, 0)
    print(sorted(wakeup.wait(0.1)))
    os.kill(os.getpid(), signal.SIGUSR1)
    print(sorted(wakeup.wait(5.0)))
    """
)


def test_signals_of_a_forked_child_are_not_received() -> None:
    """Such as the workers of a data loader."""
    found = subprocess.run([sys.executable, "-c", FORKS], check=True, capture_output=True, text=True, timeout=60)
    assert found.stdout.split("\n")[:2] == ["[]", f"[{int(signal.SIGUSR1)}]"]
