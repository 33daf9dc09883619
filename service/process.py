"""The HTTP service as a child process of rank 0: starts and ends with a life; nothing depends on it."""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from cpsr.config import ServiceConfig

__all__ = ["ServiceProcess"]

logger = logging.getLogger(__name__)

LOG_FILE = "service.log"
CLOSE_SECONDS = 8.0  # longer than it takes to drain


class ServiceProcess:
    """Runs `cpsr serve` beside the training, which never waits for it but at the very end of a life.

    If it cannot start, or dies, an event reports it, and training is not affected. The child checks whether this
    process still lives, and ends with it in every case.

    Args:
        config: of the service.
        run_dir: of the run.
        report: takes the kind of an event and its message, from any thread.

    Attributes:
        child: the process that serves; None before it was started.
    """

    def __init__(self, config: ServiceConfig, run_dir: Path, report: Callable[..., None]) -> None:
        self._config = config
        self._run_dir = run_dir
        self._report = report
        self._log = run_dir / LOG_FILE
        self._closing = False
        self.child: subprocess.Popen[bytes] | None = None
        self._watch: threading.Thread | None = None

    def start(self) -> None:
        """Start it, if configured; returns at once."""
        if not self._config.enabled:
            return
        # One thread is all that it has work for.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            with self._log.open("ab") as log:
                self.child = subprocess.Popen(  # noqa: S603 - this program itself
                    self._command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
                )
        except OSError as error:
            self._report(
                "service ended",
                f"the service could not be started: {error}; training goes on, `cpsr serve` starts it by hand",
                level=logging.WARNING,
            )
            return
        config = self._config
        self._report("service", f"the service starts on {config.host} port {config.port}; its log is {self._log}")
        self._watch = threading.Thread(target=self._wait, args=(self.child,), name="cpsr-service", daemon=True)
        self._watch.start()

    def close(self) -> None:
        """End it, after it has answered open requests."""
        if self.child is None or self._watch is None:
            return
        self._closing = True
        self.child.terminate()
        self._watch.join(CLOSE_SECONDS)
        if self._watch.is_alive():
            logger.warning("the service did not end within %g s and is killed", CLOSE_SECONDS)
            self.child.kill()
            self._watch.join(CLOSE_SECONDS)

    def _wait(self, process: "subprocess.Popen[bytes]") -> None:
        status = process.wait()
        if not self._closing:
            self._report(
                "service ended",
                f"the service ended by itself with status {status}; its log, {self._log}, has the reason; training is "
                f"not affected, `cpsr serve --run-dir {self._run_dir}` starts it by hand",
                level=logging.WARNING,
            )

    def _command(self) -> list[str]:
        config = self._config
        command = [sys.executable, "-m", "cpsr", "serve", "--run-dir", str(self._run_dir)]
        command += ["--host", config.host, "--port", str(config.port), "--parent", str(os.getpid())]
        if config.token_file is not None:
            command += ["--token-file", str(config.token_file)]
        return [*command, "--allow-writes"] if config.allow_writes else command
