"""What starts the ranks and starts them again, and the time that they have to commit when they are to leave."""

import os
from collections.abc import Mapping
from contextlib import suppress

from torch.distributed.launcher.api import LaunchConfig

from cpsr.doctor.finding import Finding, ok, warning
from cpsr.doctor.needs import Launched, Needs
from cpsr.ranks.link import SHUTDOWN, SHUTDOWN_SECONDS, report, restart_obstacle

__all__ = ["check_cluster", "check_elastic", "check_grace", "check_launcher"]

_SETTING = "shutdown_timeout"  # of torchrun, from torch 2.12 on
_KILL_SECONDS = 30.0  # Slurm's KillWait and Kubernetes' terminationGracePeriodSeconds, unless set otherwise
_SHARE = 0.5  # of the time that may be needed: another step ends first, and disks are busy when all leave at once
_ASKED_SECONDS = 120.0  # what is advised at least
_SLURM = "after its time limit only `scontrol requeue` in the batch script continues the job (docs/recipes.md)"
_RUN = "start the job with `cpsr run`"


def check_launcher(
    launched: Launched, environment: Mapping[str, str] = os.environ, *, by_cpsr: bool | None = None
) -> Finding:
    """Who starts the ranks again after a failure.

    Args:
        launched: ranks of the job.
        environment: of this process.
        by_cpsr: whether `cpsr run` started this process; None: find out.
    """
    subject = "launcher"
    by_cpsr = report() is not None if by_cpsr is None else by_cpsr
    restarts = _whole(environment.get("TORCHELASTIC_MAX_RESTARTS")) - _whole(
        environment.get("TORCHELASTIC_RESTART_COUNT")
    )
    figures = {"ranks": launched.ranks, "restarts": restarts}
    if by_cpsr:
        text = f"cpsr run, {restarts} restarts without a new iteration (--max-restarts)"
        if restarts <= 0:
            return warning(subject, text, "the first failure ends the job; give more", **figures)
        return ok(subject, text, **figures)
    if "TORCHELASTIC_RUN_ID" in environment:
        obstacle = restart_obstacle()
        text = f"torchrun, {restarts} restarts in all (--max-restarts)"
        if restarts <= 0:
            return warning(subject, text, f"the first failure ends the job; give more, or {_RUN}", **figures)
        if obstacle is not None:
            return warning(subject, text, obstacle, **figures)
        return ok(subject, text, **figures)
    if "RANK" in environment:
        text = "ranks without a launcher that starts them again"
        advice = f"a failure ends the job, until something starts all of it again; {_RUN}, one a machine"
        return warning(subject, text, advice, **figures)
    return ok(subject, f"none; {_RUN}, which starts it again after failures", **figures)


def check_elastic(needs: Needs) -> Finding | None:
    """Whether a run of another number of ranks goes on with this one; None where `elastic.min_ranks` is not set."""
    elastic, ranks = needs.config.elastic, needs.launched.ranks
    if elastic.min_ranks is None:
        return None
    text = f"{ranks} {'rank' if ranks == 1 else 'ranks'}, {elastic.min_ranks} or more"
    figures = {"ranks": ranks, "min_ranks": elastic.min_ranks}
    if elastic.allows(ranks):
        return ok("elastic", f"{text} may go on with a run", **figures)
    advice = "a run of another number is refused; see elastic.min_ranks and the launcher's --nnodes"
    return warning("elastic", f"{text} may go on with a run", advice, **figures)


def check_cluster(commit_seconds: float | None, environment: Mapping[str, str] = os.environ) -> Finding | None:
    """Slurm or Kubernetes: whether it leaves the ranks the time to commit; None without them.

    Args:
        commit_seconds: what a checkpoint of this machine's ranks takes; None: not known.
        environment: of this process.
    """
    asked = max(_ASKED_SECONDS, (commit_seconds or 0.0) / _SHARE)
    if "SLURM_JOB_ID" in environment:
        count = environment.get("SLURM_RESTART_COUNT", "0")
        text = f"job {environment['SLURM_JOB_ID']}, requeued {count} times; how early it sends SIGTERM is not visible"
        advice = f"#SBATCH --signal=TERM@{asked:.0f} --requeue --open-mode=append, unless the job has them; {_SLURM}"
        return _in_time("Slurm", text, advice, "KillWait, of 30 s unless the site has set it,", _SLURM, commit_seconds)
    if "KUBERNETES_SERVICE_HOST" in environment:
        advice = f"terminationGracePeriodSeconds: {asked:.0f}, unless the pod has more"
        text = "the grace period of the pod is not visible from inside"
        return _in_time("Kubernetes", text, advice, "default of 30 s", "", commit_seconds)
    return None


def check_grace(
    commit_seconds: float | None,
    environment: Mapping[str, str] = os.environ,
    *,
    by_cpsr: bool | None = None,
    settable: bool | None = None,
) -> Finding | None:
    """How long the launcher leaves the ranks after SIGTERM; None without one.

    Args:
        commit_seconds: what a checkpoint of this machine's ranks takes; None: not known.
        environment: of this process.
        by_cpsr: whether `cpsr run` started this process; None: find out.
        settable: whether this torchrun has a setting for it, as from torch 2.12 on; None: find out.
    """
    by_cpsr = report() is not None if by_cpsr is None else by_cpsr
    if not by_cpsr and "TORCHELASTIC_RUN_ID" not in environment:
        return None
    settable = by_cpsr or (_SETTING in LaunchConfig.__dataclass_fields__ if settable is None else settable)
    seconds = float(SHUTDOWN_SECONDS)
    if settable:
        with suppress(ValueError):
            seconds = float(environment.get(SHUTDOWN, seconds))
    text = f"the launcher leaves the ranks {seconds:g} s after SIGTERM"
    text += "" if by_cpsr or not settable else f", unless --{_SETTING.replace('_', '-')} says otherwise"
    figures = {"grace_seconds": seconds, "commit_seconds": commit_seconds}
    if commit_seconds is None:
        return ok("grace", f"{text}; not compared with a job, whose size is not given", **figures)
    text += f"; a checkpoint takes about {commit_seconds:.3g} s"
    if commit_seconds > _SHARE * seconds:
        wanted = max(_ASKED_SECONDS, commit_seconds / _SHARE)
        setting = f"set {SHUTDOWN}={wanted:.0f} (`cpsr run` sets 600)"
        return warning("grace", text, setting if settable else f"{_RUN}; torch has no setting before 2.12", **figures)
    return ok("grace", text, **figures)


def _in_time(subject: str, text: str, advice: str, default: str, more: str, commit_seconds: float | None) -> Finding:
    figures = {"commit_seconds": commit_seconds}
    if commit_seconds is None:
        return warning(subject, text, advice, **figures)
    text += f"; a checkpoint takes about {commit_seconds:.3g} s"
    if commit_seconds <= _SHARE * _KILL_SECONDS:
        return ok(subject, f"{text}, for which the {default} suffices{'; ' if more else ''}{more}", **figures)
    return warning(subject, text, advice, **figures)


def _whole(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0
