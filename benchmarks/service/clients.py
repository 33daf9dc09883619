"""Clients that ask at times of their own, whether they were answered or not."""

import asyncio
import time
from dataclasses import dataclass

import httpx

__all__ = ["PERIOD_SECONDS", "Answers", "poll"]

PERIOD_SECONDS = 1.0
TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True)
class Answers:
    """What became of the requests.

    Attributes:
        seconds: of each request that was answered with 200, from when it was meant to be sent.
        late_seconds: how much later than that these clients came to send it.
        refused: requests that were answered otherwise, or not at all.
        bytes: of the last answer.
    """

    seconds: list[float]
    late_seconds: list[float]
    refused: int
    bytes: int


def poll(url: str, clients: int, seconds: float) -> Answers:
    """Let clients ask once a second each, evenly spread over the second; connections are kept."""
    return asyncio.run(_poll(url, clients, seconds))


async def _poll(url: str, clients: int, seconds: float) -> Answers:
    taken: list[float] = []
    late: list[float] = []
    size = refused = 0

    async def ask(at: float) -> None:
        nonlocal size, refused
        await asyncio.sleep(at - time.perf_counter())
        sent = time.perf_counter()
        try:
            answer = await connections.get(url)
        except httpx.HTTPError:
            refused += 1
            return
        answered = time.perf_counter()
        if answer.status_code != httpx.codes.OK:
            refused += 1
            return
        taken.append(answered - at)
        late.append(sent - at)
        size = len(answer.content)

    # One pool for all: each AsyncClient reads the certificates of the machine once more, which takes seconds for 50.
    unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=unlimited, timeout=TIMEOUT_SECONDS) as connections:
        start = time.perf_counter() + PERIOD_SECONDS
        requests = round(clients * seconds / PERIOD_SECONDS)
        async with asyncio.TaskGroup() as asking:
            # All at once: a request that is not answered yet does not keep the next one back.
            for number in range(requests):
                asking.create_task(ask(start + number / clients * PERIOD_SECONDS))
    return Answers(taken, late, refused, size)
