"""A history as large as a model's, read from mapped files, for tests of memory."""

from pathlib import Path

import numpy
import torch

from cpsr.predictor.protocol import HistoryEntry


class MappedHistory:
    """One large operator in files that are mapped; notes the process's own memory whenever a piece is read."""

    def __init__(self, directory: Path, iterations: list[int], numel: int) -> None:
        self.entries = [HistoryEntry(i, float(i), 1.0) for i in iterations]
        self.operators = ["w"]
        self.peak_bytes = 0
        self._files = []
        for place, iteration in enumerate(iterations):
            file = numpy.memmap(directory / f"{iteration}.bin", numpy.float32, "w+", shape=(numel,))  # sparse on disk
            file[:: numel // 64] = float(place**2 % 7)
            self._files.append(torch.from_numpy(file))

    def numel(self, operator: str) -> int:
        return self._files[0].numel()

    def taken_at(self, operator: str, entry: int) -> int:
        return self.entries[entry].iteration

    def read(self, operator: str, entry: int, start: int, stop: int) -> torch.Tensor:
        self.peak_bytes = max(self.peak_bytes, own_memory_bytes())
        return self._files[entry][start:stop]


def own_memory_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024
