"""The `cpsr` command: demo, run, qualify, doctor, serve, status, inspect, explain, verify, export, plan and more.

Exit status: 0 is success, 1 is damage that `verify` found, a check of `qualify` that failed, an error that `doctor`
found or a loop that `status` reports as not restored, 2 is a command that could not be carried out.
Everything heavy is imported inside its own command, so that `cpsr --help` answers at once.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from cpsr.benchmarks.cli import DeviceOption, bench
from cpsr.demo.device import Device, find_device
from cpsr.errors import ConfigError, CPSRError

__all__ = ["app", "main"]

FAILED = 2
# Module -> extra of this package that brings it.
EXTRAS = {"matplotlib": "plots", "httpx": "bench"}

PLAN_HELP = """Plan when a described job takes checkpoints, what that costs, and what other rules would choose.

A description, all of it, as job.yaml (more keys are in docs/planning.md):

\b
    iteration_seconds: 0.6
    checkpoint: {stall_seconds: 0.5, persist_seconds: 4}
    failures: {mtbf_hours: 12, restart_seconds: 30}
    recovery:
      predictable_interval_iterations: 200
      end_cost: {per_horizon_iteration: 0.5}
"""


class _Commands(TyperGroup):
    """Prints our own exceptions as one line; anything else is a defect and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CPSRError as error:
            typer.echo(f"cpsr: {error.one_line()}", err=True)
            raise typer.Exit(FAILED) from error
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in EXTRAS:
                raise
            needed = f"this command needs {package}, which is not installed; nothing was done: pip install"
            typer.echo(f"cpsr: {needed} 'cpsr[{EXTRAS[package]}]'", err=True)
            raise typer.Exit(FAILED) from error


class _Torchrun(TyperCommand):
    """Takes its arguments as they are: torchrun's own parser reads them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
)
app.add_typer(bench, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        import cpsr

        typer.echo(f"cpsr {cpsr.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Failure recovery for large-model training that restarts near the point of failure."""


RunDirectory = Annotated[Path, typer.Argument(metavar="DIR", help="Run directory.")]
JsonPath = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")]


@app.command()
def demo(
    run_dir: Annotated[Path, typer.Option(help="Where the run is kept.")] = Path("runs/demo"),
    iterations: Annotated[int | None, typer.Option(min=1, help="Length of the run; by default the demo's own.")] = None,
    device: DeviceOption = Device.AUTO,
) -> None:
    """Train a small model, kill a rank in mid-run, and show how it comes back."""
    from cpsr.demo.main import run_demo

    found = find_device(device)
    if iterations is None:
        run_demo(run_dir, device=found)
    else:
        run_demo(run_dir, iterations=iterations, device=found)


@app.command(cls=_Torchrun, options_metavar="[torchrun's options] SCRIPT [ARGS]...")
def run(context: typer.Context) -> None:
    """Start a training job as torchrun does, and start it again after failures; takes torchrun's arguments."""
    from cpsr.launch.command import run_job

    raise typer.Exit(run_job(context.args))


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="[OPTIONS] [torchrun's options]",
)
def rehearse(
    arguments: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="As for `cpsr run`.")],
    steps: Annotated[int, typer.Option(min=6, help="Optimizer steps of each job.")] = 30,
    json_path: JsonPath = None,
    workdir: Annotated[
        Path | None, typer.Option(help="Holds the jobs while they run; by default in the folder of temporary files.")
    ] = None,
) -> None:
    """Check that a script comes back: run it twice, cut it short three times, and compare every step.

    The script runs for real, in this folder and with its own output files; only run_dir is another. Exit status: 0 if
    it comes back bit for bit, 1 if not, 2 if that could not be found out.
    """
    from cpsr.rehearse.command import rehearse as run_rehearsal

    raise typer.Exit(run_rehearsal(arguments, steps, json_path, workdir))


@app.command()
def qualify(
    device: DeviceOption = Device.AUTO,
    ranks: Annotated[int | None, typer.Option(min=1, help="By default 2, or one per GPU if there are more.")] = None,
    only: Annotated[str, typer.Option(help="Only checks whose name contains this, as 'zero1 bf16' or ': dump'.")] = "",
    json_path: JsonPath = None,
    workdir: Annotated[Path, typer.Option(help="Holds the ranks' runs, records and log.")] = Path("runs/qualify"),
) -> None:
    """Check that recovery works on this machine, by engine, ZeRO stage and precision.

    Under a launcher it is one of its ranks. Each check that ends or hangs a rank costs a restart, so allow many:
    cpsr run --nproc-per-node=8 --max-restarts=1000 -m cpsr qualify
    """
    if not __debug__:
        raise ConfigError("cpsr qualify states its checks with assertions: run Python without -O and PYTHONOPTIMIZE")
    from cpsr.qualify.command import run_qualify

    raise typer.Exit(run_qualify(device, ranks, only, json_path, workdir))


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Option(help="The job's, or DeepSpeed's with a cpsr block.")] = None,
    run_dir: Annotated[
        Path | None, typer.Option(readable=False, help="In place of the configured one; its disk is tried out.")
    ] = None,
    parameters: Annotated[
        int | None, typer.Option(min=1, help="Parameters of which a rank holds weights and moments: 12 bytes each.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, for programs.")] = False,
) -> None:
    """Check a machine for a job: GPUs, memory, limits, disk, shared directory; exit status 1 for an error.

    Under your launcher it checks all machines, and whether the ranks share the run directory:
    cpsr run --nproc-per-node=8 -m cpsr doctor --config cpsr.yaml
    """
    from cpsr.doctor.command import needs_of, run_doctor

    raise typer.Exit(run_doctor(needs_of(config, run_dir, parameters), as_json_text=as_json))


@app.command()
def serve(
    run_dir: Annotated[Path, typer.Option(help="Run directory; may still be absent.")],
    host: Annotated[str, typer.Option(help="Address to listen on; any but loopback needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8712,
    token_file: Annotated[
        Path | None, typer.Option(help="Holds the token that requests need; by default $CPSR_SERVICE_TOKEN, if set.")
    ] = None,
    allow_writes: Annotated[
        bool, typer.Option(help="Without a token: everybody on this machine may report failures and override plans.")
    ] = False,
    parent: Annotated[int | None, typer.Option(hidden=True, help="Process that this one ends with.")] = None,
) -> None:
    """Serve plans, events and metrics of a run over HTTP until SIGTERM or Ctrl-C; training is not touched."""
    from cpsr.service.access import Access, read_token
    from cpsr.service.app import create_app
    from cpsr.service.server import PORT_SECONDS, bind
    from cpsr.service.server import serve as run_service

    access = Access(read_token(token_file), allow_writes)
    listener = bind(host, port, access, PORT_SECONDS if parent is not None else 0.0)
    address = f"[{host}]" if ":" in host else host
    typer.echo(f"serving {run_dir} on http://{address}:{listener.getsockname()[1]}/")
    run_service(create_app(run_dir, access), listener, parent=parent)


@app.command()
def status(
    directory: RunDirectory,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, for programs.")] = False,
) -> None:
    """Show in a few lines whether a run trains, its interval, and its last events; status 1: a loop is not restored."""
    from cpsr.service.status import run_status

    if not run_status(directory, as_json):
        raise typer.Exit(1)


@app.command()
def inspect(
    directory: RunDirectory,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, for programs.")] = False,
) -> None:
    """Show a run's lives, checkpoints and recoveries."""
    from cpsr.cli.inspect import print_run, run_json

    if as_json:
        typer.echo(run_json(directory))
    else:
        print_run(directory)


@app.command()
def explain(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An error's class, or what a message ends with.")],
) -> None:
    """Print what an error means, what was kept and what to do: the section that a message names."""
    from cpsr.cli.explain import explain as section

    typer.echo(section(name))


@app.command()
def verify(
    location: Annotated[str, typer.Argument(metavar="DIR|URL", help="Run directory, or the URL of a target.")],
) -> None:
    """Check every committed file of a run; exit status 1 and a line per file where one is damaged."""
    from cpsr.cli.verify import is_whole

    if not is_whole(location):
        raise typer.Exit(1)


@app.command()
def release(
    directory: Annotated[Path | None, typer.Argument(metavar="[DIR]", help="Run directory.")] = None,
    orphans: Annotated[bool, typer.Option("--orphans", help="For all runs whose directory is gone.")] = False,
) -> None:
    """Free the host memory that a failed job left on this machine for a restart that will not take place."""
    from cpsr.cli.release import release_orphans, release_run

    if (directory is None) != orphans:
        raise ConfigError("name a run directory, or give --orphans for all runs whose directory is gone")
    for line in release_orphans() if directory is None else [release_run(directory)]:
        typer.echo(line)


@app.command()
def export(
    directory: RunDirectory,
    out: Annotated[Path, typer.Option(help="Output that must not exist yet: a directory, or a file of tensors.")],
    format_: Annotated[
        str, typer.Option("--format", help="universal (DeepSpeed), dcp (torch), or safetensors: the state dict.")
    ] = "universal",
    iteration: Annotated[int | None, typer.Option(min=0, help="By default the newest whole checkpoint.")] = None,
    dtype: Annotated[str, typer.Option(help="For a state dict: fp32, or trained: as in the module.")] = "fp32",
) -> None:
    """Write a committed checkpoint in a format that needs no CPSR; the run directory is only read."""
    from cpsr.export.command import run_export

    for line in run_export(directory, out, format_, dtype, iteration):
        typer.echo(line)


@app.command(help=PLAN_HELP)
def plan(
    spec: Annotated[Path, typer.Option(help="Describes the job: times, sizes, failures, curves; YAML.")],
    policy: Annotated[list[str] | None, typer.Option(help="Name; may be repeated. By default cpsr.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, for programs.")] = False,
) -> None:
    from cpsr.planner.description import run_plan

    run_plan(spec, policy or [], as_json)


def main() -> None:
    """Entry point of the `cpsr` script."""
    app()
