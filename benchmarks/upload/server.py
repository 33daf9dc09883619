"""An S3 server (moto's) on this machine in a process of its own, as fast as loopback or with slow connections.

Usage of the module itself: server.py <port> <bytes per second of a connection, 0 for no limit>
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil

from cpsr.errors import CPSRError

__all__ = ["BUCKET", "Server", "serving"]

BUCKET = "bench"
START_SECONDS = 60.0
REQUEST_SECONDS = 0.02  # of each request to a store whose connections are slow
# Of the server, for every way. It keeps objects in memory and not on a disk; reading a range then copies that range and
# not the object. Memory that it has freed serves again, where the kernel would otherwise have to clear it each time.
TUNING = {
    "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(1 << 40),
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}

Environment = dict[str, Any]
Start = Callable[..., Any]


class Server:
    """The server's process, and where it answers."""

    def __init__(self, process: "subprocess.Popen[bytes]", port: int) -> None:
        self._process = psutil.Process(process.pid)
        self.environment: Mapping[str, str] = {
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        }

    def processor_seconds(self) -> float:
        """What the server has computed so far."""
        times = self._process.cpu_times()
        return float(times.user + times.system)


@contextmanager
def serving(bytes_per_second: int) -> Iterator[Server]:
    """A server with an empty bucket; its address and credentials are in the environment meanwhile.

    Args:
        bytes_per_second: of one connection, with 20 ms for each request; 0: as fast as loopback is.

    Raises:
        CPSRError: moto or s3fs is not installed, or the server does not start.
    """
    try:
        import moto.server  # noqa: F401 - whether it is there
        import s3fs
    except ImportError as error:
        raise CPSRError(f"`cpsr bench upload` needs the extra `dev` ({error}): pip install 'cpsr[dev]'") from error
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", __name__, str(port), str(bytes_per_second)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | TUNING)
    server = Server(process, port)
    before = {name: os.environ.get(name) for name in server.environment}
    try:
        _wait_for(process, port)
        os.environ.update(server.environment)
        s3fs.S3FileSystem(skip_instance_cache=True).mkdir(BUCKET)
        yield server
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
        process.kill()
        process.wait()


def _wait_for(process: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise CPSRError(f"the S3 server of the benchmark does not start: {error}") from error
            time.sleep(0.05)


def _slowed(application: Callable[[Environment, Start], Iterable[bytes]], bytes_per_second: int) -> Any:
    """The application, each of whose answers waits as long as the bytes would take on a connection of that speed."""

    def answer(environment: Environment, start: Start) -> Iterable[bytes]:
        time.sleep(REQUEST_SECONDS + int(environment.get("CONTENT_LENGTH") or 0) / bytes_per_second)

        def begin(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            if environment["REQUEST_METHOD"] == "GET":
                size = sum(int(value) for name, value in headers if name.lower() == "content-length")
                time.sleep(size / bytes_per_second)
            return start(status, headers, *rest)

        return application(environment, begin)

    return answer


def _serve(port: int, bytes_per_second: int) -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import run_simple

    application: Any = DomainDispatcherApplication(create_backend_app)
    if bytes_per_second:
        application = _slowed(application, bytes_per_second)
    run_simple("127.0.0.1", port, application, threaded=True, request_handler=MotoRequestHandler)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))
