"""A thread receives signals, unless there is another receiver."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from cpsr.ranks.emergency_dump import Wakeup


@pytest.fixture(autouse=True)
def handled() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_an_earlier_receiver_goes_on_to_receive_alone() -> None:
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    before = signal.set_wakeup_fd(sender)
    try:
        with pytest.raises(ValueError, match="arrive at descriptor"):
            Wakeup()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert os.read(receiver, 1) == bytes([signal.SIGUSR1])
    finally:
        signal.set_wakeup_fd(before)


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
