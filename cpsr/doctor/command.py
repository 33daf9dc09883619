"""`cpsr doctor`: checks this machine, or as one of the ranks of a job its machines and what they share."""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from cpsr.config import CPSRConfig
from cpsr.doctor.examination import Examination
from cpsr.doctor.finding import Finding, error, worst
from cpsr.doctor.meeting import Meeting, MissingRankError, meet
from cpsr.doctor.needs import BYTES_PER_PARAMETER, Launched, Needs
from cpsr.doctor.report import as_json, lines
from cpsr.errors import ConfigError
from cpsr.ranks.link import REFUSED_STATUS, report

__all__ = ["needs_of", "run_doctor"]

FAILED = 1
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

    """
    if os.environ.get(_RESTARTS, "0") != "0":
        return _after_first_report()
    reports = os.environ.get("RANK", "0") == "0"
    try:
        meeting = meet() if "RANK" in os.environ and needs.launched.ranks > 1 else Meeting()
        findings = Examination(meeting, needs, has_run_dir=has_run_dir).run()
    except MissingRankError as missing:
        _leave()
        if not reports:
            return _stopped(missing)
        meeting = Meeting()
        findings = [_missing(missing), *Examination(meeting, needs, has_run_dir=has_run_dir).run()]
    if reports:
        _print(needs, findings, as_json_text)
    with suppress(MissingRankError):  # all has been said
        meeting.barrier()  # the end of one rank may end the others, of which one prints
    _leave()
    return _failed("cpsr doctor found errors") if worst(findings) == "error" else 0


def _missing(missing: MissingRankError) -> Finding:
    """The line about it, above those of rank 0 alone."""
    place = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    advice = (
        f"see its log and its machine; the ranks meet at {place}, and gloo needs all ports between the machines; the "
        "other lines are of rank 0 alone"
    )
    return error("ranks", str(missing), advice, missing_ranks=list(missing.ranks))


def _stopped(missing: MissingRankError) -> int:
    """Of a rank that prints no report: a line where rank 0 cannot say it."""
    if 0 in missing.ranks:
        place = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        advice = f"look at rank 0, its log, and whether {place} can be reached from here"
        print(f"cpsr doctor: {missing}; {advice}", file=sys.stderr, flush=True)  # noqa: T201
    return _failed(f"cpsr doctor stopped: {missing}")


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _after_first_report() -> int:
    """Of ranks that a launcher has started again: nothing is looked at, since torchrun's store still has the first."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_LINE_SECONDS)
    else:
        text = (
            "cpsr doctor: the launcher started the ranks again, and nothing more is looked at: see the first report; "
            "without one a rank ended before it, see the launcher's lines"
        )
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
