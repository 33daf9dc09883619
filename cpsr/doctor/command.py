"""`cpsr doctor`: checks this machine, or as one of the ranks of a job its machines and what they share."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from cpsr.config import CPSRConfig
from cpsr.doctor.examination import Examination
from cpsr.doctor.finding import Finding, error, worst
from cpsr.doctor.needs import BYTES_PER_PARAMETER, Launched, Needs
from cpsr.doctor.report import as_json, lines
from cpsr.errors import ConfigError, CPSRError
from cpsr.ranks.group import Group
from cpsr.ranks.link import REFUSED_STATUS, report

__all__ = ["needs_of", "run_doctor"]

FAILED = 1
_MEET_SECONDS = 60.0
_REASON_CHARACTERS = 200
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_LINE_SECONDS = 10.0  # until which a machine's first rank has printed; its end ends the others


def needs_of(
    config: Path | None, run_dir: Path | None, state_bytes: int | None, parameters: int | None, ranks: int | None
) -> Needs:
    """The job, as far as it is given.

    Args:
        config: file of its configuration, or the DeepSpeed configuration with that as a block.
        run_dir: in place of the configured one.
        state_bytes: weights and moments of one rank.
        parameters: of which one rank holds them, in place of their bytes.
        ranks: on this machine; None: as the launcher has it.

    Raises:
        ConfigError: the configuration is not usable, both sizes are given, or a launcher has started other ranks.
    """
    launched = Launched.of()
    if ranks is not None and launched.ranks > 1 and ranks != launched.local_ranks:
        raise ConfigError(f"--ranks {ranks}: the launcher has started {launched.local_ranks} here; leave it out")
    if ranks is not None and launched.ranks == 1:
        launched = Launched(ranks, ranks)
    if state_bytes is not None and parameters is not None:
        raise ConfigError("give either --state-bytes or --parameters, which is 12 bytes each")
    if parameters is not None:
        state_bytes = BYTES_PER_PARAMETER * parameters
    loaded = CPSRConfig(run_dir=Path()) if config is None else CPSRConfig.load(config)
    if run_dir is not None:
        loaded = loaded.model_copy(update={"run_dir": run_dir})
    return Needs(loaded, launched, state_bytes)


def run_doctor(needs: Needs, *, has_run_dir: bool, as_json_text: bool) -> int:
    """Check, and print on rank 0; under a launcher a collective of all ranks.

    Args:
        needs: the job.
        has_run_dir: whether its run directory was given.
        as_json_text: print one JSON object.

    Returns:
        The exit status: 0, or 1 if there is an error; of a rank of `cpsr run` one after which it does not restart.

    Raises:
        CPSRError: another rank has ended before its checks had.
    """
    if os.environ.get(_RESTARTS, "0") != "0":
        return _after_first_report()
    findings: list[Finding] = []
    with _met(needs.launched, findings) as group:
        try:
            findings += Examination(group, needs, has_run_dir=has_run_dir).run()
        except RuntimeError as problem:  # of gloo
            raise CPSRError(f"the checks stopped: another rank is gone or hangs ({_brief(problem)})") from problem
    if os.environ.get("RANK", "0") == "0":
        _print(needs, findings, as_json_text)
    return _failed("cpsr doctor found errors") if worst(findings) == "error" else 0


def _after_first_report() -> int:
    """Of ranks that a launcher has started again: nothing is looked at, since torchrun's store still has the first."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_LINE_SECONDS)
    else:
        text = "cpsr doctor: the launcher started the ranks again, and nothing more is looked at: see the first report"
        print(text, file=sys.stderr, flush=True)  # noqa: T201
    return _failed("cpsr doctor has looked once: see the first report")


def _failed(message: str) -> int:
    launcher = report()
    if launcher is None:
        return FAILED
    launcher.refuse(message)  # or `cpsr run` would start the ranks again
    return REFUSED_STATUS


def _print(needs: Needs, findings: list[Finding], as_json_text: bool) -> None:
    if as_json_text:
        machines = sorted({one.machine for one in findings if one.machine})
        print(as_json(findings, {"ranks": needs.launched.ranks, "machines": machines}), flush=True)  # noqa: T201
        return
    for line in lines(findings):
        print(line, flush=True)  # noqa: T201


@contextmanager
def _met(launched: Launched, findings: list[Finding]) -> Iterator[Group]:
    """The ranks of the job as a group; this process alone without a launcher, or where they cannot meet."""
    try:
        try:
            if "RANK" in os.environ and launched.ranks > 1:
                dist.init_process_group("gloo", timeout=timedelta(seconds=_MEET_SECONDS))
            group = Group()
        except (RuntimeError, ValueError) as problem:
            if dist.is_initialized():
                dist.destroy_process_group()
            place = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
            advice = "see the address below; gloo needs all ports between the machines; the other lines are of one rank"
            findings.append(error("ranks", f"the ranks cannot meet at {place} ({_brief(problem)})", advice))
            group = Group()
        yield group
        group.close()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _brief(problem: Exception) -> str:
    return " ".join(str(problem).split())[:_REASON_CHARACTERS]
