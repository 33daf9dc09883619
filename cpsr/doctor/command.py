"""`cpsr doctor`: checks this machine, or as one of the ranks of a job its machines and what they share."""

import json
import os
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from cpsr.checkpoint.resources import host_buffers, kept_bytes
from cpsr.config import CPSRConfig
from cpsr.doctor import disk, machine
from cpsr.doctor.machine import Finding
from cpsr.ranks.group import Group, this_node
from cpsr.ranks.link import REFUSED_STATUS, report

__all__ = ["Needs", "needs_of", "run_doctor"]

FAILED = 1
WAIT_SECONDS = 60.0  # for a rank that does not come
REPORT_SECONDS = 5.0  # in which rank 0 reports that some are missing: a launcher ends all ranks when one ends
BYTES_PER_PARAMETER = 12  # Adam with weights or masters in fp32: a weight and two moments
_TENSORS_PER_PARAMETER = 3


@dataclass(frozen=True)
class Needs:
    """A job, as far as it is known.

    Attributes:
        config: given, or the defaults.
        has_run_dir: whether its run directory was given.
        state_bytes: weights and moments of one rank; None: not known.
    """

    config: CPSRConfig
    has_run_dir: bool
    state_bytes: int | None = None

    def bytes_of(self, ranks: int, copies: int = 1) -> int | None:
        """Weights and moments of so many ranks, so many times; None where their size is not known."""
        return None if self.state_bytes is None else copies * ranks * self.state_bytes


def needs_of(config: Path | None, run_dir: Path | None, parameters: int | None) -> Needs:
    """The job that a configuration file describes; `run_dir`, if given, replaces its run directory.

    Raises:
        ConfigError: the configuration is not usable.
    """
    state_bytes = None if parameters is None else BYTES_PER_PARAMETER * parameters
    loaded = CPSRConfig(run_dir=Path()) if config is None else CPSRConfig.load(config)
    if run_dir is not None:
        loaded = loaded.model_copy(update={"run_dir": run_dir})
    return Needs(loaded, config is not None or run_dir is not None, state_bytes)


def run_doctor(needs: Needs, *, as_json_text: bool) -> int:
    """Check, and print on rank 0; under a launcher a collective of all ranks.

    Args:
        needs: the job.
        as_json_text: print one JSON object.

    Returns:
        The exit status: 0, or 1 if there is an error; of a rank of `cpsr run` one after which it does not restart.
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        print("cpsr doctor has looked once: see the first report", file=sys.stderr, flush=True)  # noqa: T201
        return _ended(has_errors=True)
    try:
        findings = [*_meet(), *_of_all(Group(WAIT_SECONDS), needs)]
    except RuntimeError as problem:  # of gloo, or of the ranks' store
        advice = "see its log and its machine; gloo needs all ports between the machines. The rest is of this machine"
        missing = Finding("error", "ranks", " ".join(str(problem).split()), advice)
        findings = [missing, *_of_machine(needs, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))]
        if os.environ["RANK"] != "0":
            time.sleep(REPORT_SECONDS)
    if os.environ.get("RANK", "0") == "0":
        _print(findings, as_json_text)
    if dist.is_initialized():
        if all(one.subject != "ranks" or one.level == "ok" for one in findings):
            dist.barrier()  # a launcher ends all ranks when one ends, and rank 0 prints
        dist.destroy_process_group()
    return _ended(has_errors=any(one.level == "error" for one in findings))


def _meet() -> Iterator[Finding]:
    """Initialise `torch.distributed` over gloo where a launcher has started ranks; a collective of all of them.

    Raises:
        RuntimeError: some did not come in time, or cannot connect; the message names them.
    """
    if "RANK" not in os.environ or os.environ.get("WORLD_SIZE") == "1":
        return
    wait = timedelta(seconds=WAIT_SECONDS)
    try:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun does
        store = dist.TCPStore(host, port, None, serves, wait, wait_for_workers=False)  # type: ignore[attr-defined]
    except (KeyError, ValueError) as problem:
        raise RuntimeError(f"the launcher's variables do not say where the ranks meet ({problem!r})") from problem
    keys = [f"cpsr-doctor/{one}" for one in range(ranks)]
    store.set(keys[rank], this_node())
    try:
        store.wait(keys, wait)
    except RuntimeError:
        absent = [str(one) for one, key in enumerate(keys) if not store.check([key])]
        message = f"ranks {', '.join(absent)} of {ranks} did not come to {host}:{port} within {WAIT_SECONDS:g} s"
        raise RuntimeError(message) from None
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=wait)
    dist.barrier()
    yield Finding("ok", "ranks", f"all {ranks} ranks meet at {host}:{port} and are connected")


def _of_all(group: Group, needs: Needs) -> list[Finding]:
    """The findings of all ranks, on every rank; a collective."""
    nodes = group.nodes
    found: list[Finding] = []
    if first_on_machine := group.rank == nodes.index(this_node()):
        found += _of_machine(needs, nodes.count(this_node()))
    name = group.broadcast(uuid.uuid4().hex[:12])
    with ExitStack() as opened:
        folder = None
        if needs.has_run_dir:
            try:
                folder = opened.enter_context(disk.scratch_folder(needs.config.run_dir, name))
            except OSError as problem:
                found.append(machine.failed("run directory", problem))
            if group.size > 1:
                shared = disk.check_shared(group, folder, needs.config.run_dir)
                found += [shared] if group.rank == 0 else []
        if folder is not None and first_on_machine:
            own = folder / f"rank-{group.rank}"
            found += _of_disk(own, needs, group.size)
        group.barrier()  # the folder is removed once nobody needs it
    if group.rank == 0 and not needs.has_run_dir:
        found.append(
            Finding("warning", "run directory", "none is given", "give --config or --run-dir, and its disk is checked")
        )
    parts = group.gather([asdict(replace(one, machine=this_node())) for one in found])
    group.close()
    return [Finding(**one) for part in parts for one in part]


def _of_machine(needs: Needs, local_ranks: int) -> Iterator[Finding]:
    yield machine.check_devices(local_ranks)
    yield from machine.check_memory(needs.bytes_of(local_ranks, host_buffers(needs.config)))
    yield machine.check_memory_kind()


def _of_disk(folder: Path, needs: Needs, ranks: int) -> Iterator[Finding]:
    config = needs.config
    try:
        folder.mkdir()
        yield machine.check_file_system(config.run_dir)
        kept = kept_bytes(needs.state_bytes or 0, (needs.state_bytes or 0) // _TENSORS_PER_PARAMETER, config)
        yield disk.check_space(config.run_dir, None if needs.state_bytes is None else ranks * kept)
        yield disk.check_durable(folder)
    except OSError as problem:
        yield machine.failed("disk", problem)


def _ended(*, has_errors: bool) -> int:
    launcher = report()
    if launcher is None or not has_errors:
        return FAILED if has_errors else 0
    launcher.refuse("cpsr doctor found errors")  # or `cpsr run` would start the ranks again
    return REFUSED_STATUS


def _print(findings: Sequence[Finding], as_json_text: bool) -> None:
    """A line for each finding, or one JSON object; machines that say the same share a line."""
    if as_json_text:
        print(json.dumps({"findings": [asdict(one) for one in findings]}), flush=True)  # noqa: T201
        return
    machines: dict[tuple[str, str, str], list[str]] = {}
    for one in findings:
        machines.setdefault((one.level, one.subject, one.sentence), []).append(one.machine)
    several = len({one.machine for one in findings if one.machine}) > 1
    for (level, subject, sentence), where in machines.items():
        print(f"{level:9}{subject:18}{f'[{where[0]}] ' if several else ''}{sentence}", flush=True)  # noqa: T201
