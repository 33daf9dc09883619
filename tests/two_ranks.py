"""A script run as two gloo ranks; each leaves its findings as JSON in the file named by its argument and its rank."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any


def run(script: str, directory: Path) -> tuple[Any, Any]:
    """What the two ranks found, once both have ended well."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", script, str(directory / "found")]
    ranks = [subprocess.Popen(command, env={**env, "RANK": str(rank)}) for rank in range(2)]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
    first, second = (json.loads((directory / f"found.{rank}").read_text()) for rank in range(2))
    return first, second
