"""The `cpsr` command: demo, run, serve, status, inspect, verify, fetch, export, plan, simulate, bench.

Exit status: 0 is success, 1 is damage that `verify` found, 2 is a command that could not be carried out.
Everything heavy is imported inside its own command, so that `cpsr --help` answers at once.
"""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand, TyperGroup

from cpsr.errors import ConfigError, CPSRError, RunMismatchError
from cpsr.tables import print_table

if TYPE_CHECKING:
    from cpsr.journal import CheckpointRow, LifeRow, RecoveryRow, RehearsalRow

__all__ = ["app", "main"]

FAILED = 2
RUN_FILES = ("run.json", "journal.db", "checkpoints")  # any of them shows that a directory is a run's
TABLE_ROWS_MAX = 20  # newest checkpoints in a table; --json has all


PLAN_HELP = """When a described job should take checkpoints, what that costs, and what other rules would choose.

A description, all of it, as job.yaml (more keys are in docs/planning.md):

\b
    iteration_seconds: 0.6
    checkpoint: {stall_seconds: 0.5, persist_seconds: 4}
    failures: {mtbf_hours: 12, restart_seconds: 30}
    recovery:
      predictable_interval_iterations: 200
      lag: {per_horizon_iteration: 0.8}
"""
SIMULATE_HELP = """Simulate what failures cost a job, by checkpoint policy; nothing is trained.

It takes what `cpsr plan` takes, and more. A description, all of it, as
simulation.yaml (more keys are in docs/simulation.md):

\b
    iteration_seconds: 3.0
    checkpoint: {stall_seconds: 4, persist_seconds: 60}
    failures: {mtbf_hours: 3, restart_seconds: 120, process: poisson}
    recovery:
      predict_seconds: 10
      predictable_interval_iterations: 300
      lag: {per_horizon_iteration: 0.3}
    wall_days: 54
    policies:
      - young
      - checkfreq
      - cpsr
"""


class _Commands(TyperGroup):
    """Prints our own exceptions as one line; anything else is a defect and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CPSRError as error:
            typer.echo(f"cpsr: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(FAILED) from error


class _Torchrun(TyperCommand):
    """Takes its arguments as they are: torchrun's own parser reads them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []


app = typer.Typer(
    cls=_Commands,
    help="Failure recovery for large-model training that restarts near the point of failure.",
    no_args_is_help=True,
    add_completion=False,
)
bench = typer.Typer(help="Measure what checkpoints and failures cost.", no_args_is_help=True)
app.add_typer(bench, name="bench")

RunDirectory = Annotated[Path, typer.Argument(metavar="DIR", help="Run directory.")]
JsonPath = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")]
Workdir = Annotated[Path | None, typer.Option(help="On the disk to be measured; emptied again. By default /tmp.")]


@app.command()
def demo(
    run_dir: Annotated[Path, typer.Option(help="Where the run is kept.")] = Path("runs/demo"),
    iterations: Annotated[int | None, typer.Option(min=1, help="Length of the run; by default the demo's own.")] = None,
) -> None:
    """Train a small model, kill a rank in mid-run, and show how it comes back."""
    from cpsr.demo.main import run_demo

    if iterations is None:
        run_demo(run_dir)
    else:
        run_demo(run_dir, iterations=iterations)


@app.command(cls=_Torchrun, options_metavar="[torchrun's options] SCRIPT [ARGS]...")
def run(context: typer.Context) -> None:
    """Start a training job as torchrun does, and start it again after failures; takes torchrun's arguments."""
    from cpsr.launch.command import run_job

    raise typer.Exit(run_job(context.args))


@app.command()
def serve(
    run_dir: Annotated[Path, typer.Option(help="A run's directory, or one that holds several; may still be absent.")],
    host: Annotated[str, typer.Option(help="Address to listen on; any but loopback needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8712,
    token_file: Annotated[
        Path | None, typer.Option(help="Holds the token that requests need; by default $CPSR_SERVICE_TOKEN, if set.")
    ] = None,
    allow_writes: Annotated[
        bool, typer.Option(help="Without a token: everybody on this machine may report failures and override plans.")
    ] = False,
    connections_max: Annotated[int, typer.Option(min=1, help="Connections at a time; requests beyond get 503.")] = 256,
    idle_seconds: Annotated[int, typer.Option(min=1, help="Connections without a request end after so long.")] = 5,
    parent: Annotated[int | None, typer.Option(hidden=True, help="Process that this one ends with.")] = None,
) -> None:
    """Answer about runs over HTTP until SIGTERM or Ctrl-C: plans, what happened, metrics; training is not touched."""
    from cpsr.service.access import Access, read_token
    from cpsr.service.app import create_app
    from cpsr.service.server import PORT_SECONDS, Connections, bind
    from cpsr.service.server import serve as run_service

    access = Access(read_token(token_file), allow_writes)
    listener = bind(host, port, access, PORT_SECONDS if parent is not None else 0.0)
    address = f"[{host}]" if ":" in host else host
    typer.echo(f"serving {run_dir} on http://{address}:{listener.getsockname()[1]}/")
    run_service(create_app(run_dir, access), listener, Connections(connections_max, idle_seconds), parent)


@app.command()
def status(
    location: Annotated[str, typer.Argument(metavar="DIR|URL", help="Run directory, or the URL of a service.")],
    run: Annotated[str | None, typer.Option(help="Name of the run, where the service is over several.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, for programs.")] = False,
) -> None:
    """How a run is, how often it takes checkpoints, and what happened last, in a few lines."""
    from cpsr.status import run_status

    run_status(location, run, as_json)


@app.command()
def inspect(
    directory: RunDirectory,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, for programs.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Of recoveries, the numbers of fit and check.")] = False,
) -> None:
    """Show a run's lives, checkpoints and recoveries."""
    from cpsr.exits import BEGAN, FAILED
    from cpsr.journal import JournalReader, json_ready

    with JournalReader(directory / "journal.db") as reader:
        rows: dict[str, list[Any]] = {
            "lives": reader.lives(),
            "checkpoints": reader.checkpoints(),
            "failures": reader.failures(),
            "recoveries": reader.recoveries(),
            "rehearsals": reader.rehearsals(),
            "phases": reader.phases(),
            "plans": [plan for plan in [reader.latest_plan()] if plan],
        }
        events = reader.events()
    # A life's end is told by the next one, which reads the notes that launcher and ranks have left.
    causes = {event.life - 1: event.message for event in events if event.kind == FAILED}
    began = {} if verbose else {event.life: event.message for event in events if event.kind == BEGAN}
    if as_json:
        # NaN has no number in JSON; a reader that gets its name cannot take it for one.
        typer.echo(json.dumps({name: [json_ready(dataclasses.asdict(row)) for row in rows[name]] for name in rows}))
        return
    console = Console()
    for table in (_lives_table(rows["lives"], causes), _checkpoints_table(rows["checkpoints"])):
        table.columns[-1].overflow = "fold"  # hosts and reasons may be long words
        print_table(console, table)
    if rows["recoveries"]:
        print_table(console, _recoveries_table(rows["recoveries"]))
        for row in rows["recoveries"]:
            console.print(f"Life {row.life}: {escape(began.get(row.life, row.reason))}", highlight=False)
    else:
        console.print("No recovery so far.")
    if rows["rehearsals"]:
        print_table(console, _rehearsals_table(rows["rehearsals"]))
    for plan in rows["plans"]:
        console.print(
            f"From iteration {plan.from_iteration} on a checkpoint every {plan.interval_iterations} iterations "
            f"({plan.origin}); phases so far: {len(rows['phases'])}"
        )


@app.command()
def verify(
    location: Annotated[str, typer.Argument(metavar="DIR|URL", help="Run directory, or the URL of a target.")],
) -> None:
    """Check every committed file of a run; exit status 1 and a line per file where one is damaged."""
    if "://" in location:
        from cpsr.target.command import run_verify

        damages = run_verify(location)
        for damage in damages:
            typer.echo(damage)
        if damages:
            typer.echo(f"{len(damages)} damaged files; recovery takes another copy", err=True)
            raise typer.Exit(1)
        typer.echo("every committed copy is whole")
        return
    directory = Path(location)
    if not any((directory / name).exists() for name in RUN_FILES):
        raise RunMismatchError(
            f"{directory} is no run directory: it holds none of {', '.join(RUN_FILES)}; name the one that the "
            "training was given as run_dir"
        )
    from cpsr.checkpoint.verify import verify_run

    problems = verify_run(directory)
    for problem in problems:
        where = "" if problem.iteration is None else f" (iteration {problem.iteration})"
        typer.echo(f"{problem.file}: {problem.what}{where}")
    if problems:
        typer.echo(f"{directory}: {len(problems)} damaged files; recovery skips their checkpoints", err=True)
        raise typer.Exit(1)
    typer.echo(f"{directory}: every committed checkpoint is whole")


@app.command()
def fetch(
    url: Annotated[str, typer.Argument(metavar="URL", help="What the run has as checkpoint.target.")],
    directory: RunDirectory,
    iteration: Annotated[int | None, typer.Option(min=0, help="By default the newest whole copy.")] = None,
) -> None:
    """Bring a copy at a target into a run directory in which no job runs; a job does it by itself when it starts."""
    from cpsr.target.command import run_fetch

    for line in run_fetch(url, directory, iteration):
        typer.echo(line)


@app.command()
def release(
    directory: Annotated[Path | None, typer.Argument(metavar="[DIR]", help="Run directory.")] = None,
    orphans: Annotated[bool, typer.Option("--orphans", help="Of all runs whose directory is gone.")] = False,
) -> None:
    """Free this machine's memory of what a failed job left there for its restart, where it will not be restarted."""
    from cpsr.release import release_orphans, release_run

    if (directory is None) != orphans:
        raise ConfigError("name a run directory, or give --orphans for all runs whose directory is gone")
    for line in release_orphans() if directory is None else [release_run(directory)]:
        typer.echo(line)


@app.command()
def export(
    directory: RunDirectory,
    out: Annotated[Path, typer.Option(help="What is written, not there yet: a directory (universal), or a file.")],
    format_: Annotated[
        str, typer.Option("--format", help="universal (of DeepSpeed, with moments), or safetensors: the state dict.")
    ] = "universal",
    iteration: Annotated[int | None, typer.Option(min=0, help="By default the newest whole checkpoint.")] = None,
    dtype: Annotated[str, typer.Option(help="Of a state dict: fp32, or trained: what the module held.")] = "fp32",
) -> None:
    """Write a committed checkpoint in a format that needs no CPSR; the run's directory is only read."""
    from cpsr.export.command import run_export

    for line in run_export(directory, out, format_, dtype, iteration):
        typer.echo(line)


@app.command(help=PLAN_HELP)
def plan(
    spec: Annotated[Path, typer.Option(help="Describes the job: times, sizes, failures, curves; YAML.")],
    policy: Annotated[list[str] | None, typer.Option(help="Name; may be repeated. By default cpsr.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, for programs.")] = False,
) -> None:
    from cpsr.planner.command import run_plan
    from cpsr.simulate.spec import require_no_simulation

    require_no_simulation(spec)
    run_plan(spec, policy or [], as_json)


@app.command("simulate", help=SIMULATE_HELP)
def simulate_command(
    spec: Annotated[Path, typer.Option(help="Describes the job, its checkpoints and failures; YAML.")],
    trace: Annotated[Path | None, typer.Option(help="File of recorded failures, in place of the spec's.")] = None,
    policies: Annotated[str | None, typer.Option(help="Names, comma-separated, in place of the spec's.")] = None,
    json_path: JsonPath = None,
) -> None:
    from cpsr.simulate.command import run_simulation

    run_simulation(spec, trace, policies.split(",") if policies is not None else None, json_path)


@bench.command()
def stall(
    json_path: JsonPath = None,
    pairs: Annotated[int, typer.Option(min=1, help="Checkpoints per method and size.")] = 30,
    workdir: Workdir = None,
) -> None:
    """What a checkpoint costs the training thread and what survives damage, beside other packages' checkpoints."""
    from cpsr.benchmarks.stall.run import main as run_stall

    run_stall(json_path=json_path, pairs=pairs, workdir=workdir)


@bench.command("plan")
def bench_plan(
    json_path: JsonPath = None,
    real: Annotated[bool, typer.Option("--real", help="What failing jobs cost, beside their plans, instead.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="With --real: trainings, of about 10 minutes each.")] = 3,
    mtbf_iterations: Annotated[int, typer.Option(min=20, help="With --real: between failures, on average.")] = 88,
    failures: Annotated[int, typer.Option(min=1, help="With --real: in each job; the aim is for 10.")] = 10,
    cache: Annotated[Path | None, typer.Option(help="With --real: keeps the jobs; runs/bench-plan-real.")] = None,
) -> None:
    """Time to make one plan for up to 1,000 ranks, or how well the plans of failing jobs foretell their cost."""
    if real:
        from cpsr.benchmarks.plan.injection import Injection
        from cpsr.benchmarks.plan.real import CACHE
        from cpsr.benchmarks.plan.real import main as run_real

        injection = Injection(failures=failures, mtbf_iterations=mtbf_iterations)
        run_real(json_path, seeds, CACHE if cache is None else cache, injection)
        return
    from cpsr.benchmarks.plan.run import main as run_plan_benchmark

    run_plan_benchmark(json_path)


@bench.command()
def overhead(
    json_path: JsonPath = None,
    full: Annotated[bool, typer.Option("--full", help="More of everything: about half an hour.")] = False,
    parts: Annotated[
        str, typer.Option(help="wrapper, bubbles (of a pipeline), memory (over a run): some of them, comma-separated.")
    ] = "wrapper,bubbles,memory",
    workdir: Workdir = None,
) -> None:
    """Extra time of training steps, the predictor's work against a pipeline's bubbles, and its memory."""
    from cpsr.benchmarks.overhead.run import DEFAULT, FULL
    from cpsr.benchmarks.overhead.run import main as run_overhead

    names = [part.strip() for part in parts.split(",") if part.strip()]
    run_overhead(json_path, FULL if full else DEFAULT, names, workdir)


@bench.command()
def fit(
    run_dir: Annotated[list[Path], typer.Option(help="Run directory, or a run that bench recovery keeps; repeatable.")],
    phase_iterations: Annotated[int, typer.Option(min=10, help="Longest length of a phase.")] = 500,
    json_path: JsonPath = None,
) -> None:
    """How well the loss curves of finished runs are fitted and forecast online."""
    from cpsr.benchmarks.loss_fit.run import main as run_fit

    run_fit(run_dir, phase_iterations, json_path)


@bench.command()
def recovery(
    quick: Annotated[
        bool, typer.Option("--quick", help="A subset of about 5 minutes on two cores; the default.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="The whole grid: hours; interrupt it and go on at will.")
    ] = False,
    points: Annotated[int | None, typer.Option(min=1, help="Failure points in each cell and seed.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Training runs of each workload.")] = None,
    workloads: Annotated[str | None, typer.Option(help="Names, comma-separated.")] = None,
    methods: Annotated[str | None, typer.Option(help="Names, comma-separated.")] = None,
    intervals: Annotated[str | None, typer.Option(help="Iterations between checkpoints, comma-separated.")] = None,
    infeasible: Annotated[bool, typer.Option("--infeasible", help="Also intervals beyond what can work.")] = False,
    failures: Annotated[int | None, typer.Option(min=1, help="Follow runs that fail so often, instead.")] = None,
    warm_up: Annotated[bool, typer.Option("--warm-up", help="Failures early in the run, instead.")] = False,
    ablation: Annotated[bool, typer.Option("--ablation", help="One component replaced at a time, instead.")] = False,
    rehearsal_budget: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of the training for rehearsals; by default 0.005.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes of one thread; by default up to 2.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Keeps what was trained; by default runs/bench-recovery.")] = None,
    json_path: JsonPath = None,
) -> None:
    """What a failure costs: the lag that stays after coming back, by every method, on paired data."""
    from cpsr.benchmarks.recovery.command import run_recovery
    from cpsr.benchmarks.recovery.grid import selection

    if quick and full:
        raise ConfigError("--quick and --full exclude each other: name one of them, or none for --quick")
    chosen = selection(full, points, seeds, workloads, methods, infeasible, rehearsal_budget, intervals)
    run_recovery(chosen, failures, warm_up, ablation, cache, json_path, workers)


@bench.command()
def prior(
    failures: Annotated[int, typer.Option(min=0, help="Failures of each run; 0 only fits what is there.")] = 10,
    settings: Annotated[int, typer.Option(min=1, help="Settings of the line drawn at each.")] = 8,
    directions: Annotated[int, typer.Option(min=0, help="Failures at which the two directions are compared.")] = 8,
    data: Annotated[Path | None, typer.Option(help="Directory of the measured recoveries.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Keeps what was trained; by default runs/bench-prior.")] = None,
    table: Annotated[Path | None, typer.Option(help="Write the fitted table here.")] = None,
    json_path: JsonPath = None,
) -> None:
    """Measure recoveries with many settings on runs of their own, and fit the predictor's prior table to them."""
    from cpsr.benchmarks.prior.run import CACHE, DATA
    from cpsr.benchmarks.prior.run import main as run_prior

    run_prior(data or DATA, cache or CACHE, failures, settings, directions, table, json_path)


@bench.command()
def predictor(
    parameters: Annotated[str, typer.Option(help="Size of the model: 350M, 124M or 10M.")] = "350M",
    checkpoints: Annotated[int, typer.Option(min=3, help="In the history; 4 bytes a parameter each.")] = 8,
    methods: Annotated[str, typer.Option(help="Names, comma-separated.")] = "default",
    repeats: Annotated[int, typer.Option(min=1, help="Turns of reading and predicting, per method.")] = 7,
    tokens: Annotated[int, typer.Option(min=1, help="A training batch is one sequence of this length.")] = 256,
    cache: Annotated[Path | None, typer.Option(help="Holds the history; by default runs/bench-predictor.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the history there, for the next call.")] = False,
    json_path: JsonPath = None,
) -> None:
    """Memory and speed of prediction over a history on disk, beside reading it and beside training."""
    from cpsr.benchmarks.predictor_cost.run import CACHE
    from cpsr.benchmarks.predictor_cost.run import main as run_predictor

    run_predictor(parameters, checkpoints, methods, repeats, tokens, CACHE if cache is None else cache, keep, json_path)


@bench.command()
def faults(
    every: Annotated[int, typer.Option(min=1, help="Only every so many faults of each scenario.")] = 1,
    only: Annotated[
        str,
        typer.Option(
            help="Parts, comma-separated; by default all. `live` is real jobs, `sparse` all with sparse checkpoints."
        ),
    ] = "",
    seed: Annotated[int, typer.Option(help="With which scenarios of real jobs are drawn.")] = 0,
    json_path: JsonPath = None,
    workdir: Workdir = None,
) -> None:
    """Kill, refuse and damage the checkpoint store at every point, then real jobs by signals; restart after each."""
    from cpsr.benchmarks.faults.run import main as run_faults

    run_faults(json_path, every, only, workdir, seed)


@bench.command("service")
def bench_service(
    json_path: JsonPath = None,
    steps: Annotated[int, typer.Option(min=1000, help="Rows of the journal.")] = 10_000_000,
    checkpoints: Annotated[int, typer.Option(min=1, help="Rows of the journal.")] = 100_000,
    clients: Annotated[int, typer.Option(min=1, max=200, help="Each asks once a second.")] = 50,
    seconds: Annotated[float, typer.Option(min=1, help="For which they do.")] = 60.0,
    cache: Annotated[Path | None, typer.Option(help="Keeps the journal; by default runs/bench-service.")] = None,
    workdir: Workdir = None,
) -> None:
    """How fast the service says what the plan is over a long run's journal beside training, and its memory."""
    from cpsr.benchmarks.service.run import CACHE
    from cpsr.benchmarks.service.run import main as run_service_benchmark

    run_service_benchmark(json_path, steps, checkpoints, clients, seconds, workdir, CACHE if cache is None else cache)


@bench.command("experts")
def bench_experts(
    quick: Annotated[bool, typer.Option("--quick", help="About 12 minutes on two cores; the default.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="More models and policies: about two hours; interrupt it at will.")
    ] = False,
    parts: Annotated[
        str, typer.Option(help="arithmetic, stall, writes, failures: some of them, comma-separated.")
    ] = "arithmetic,stall,writes,failures",
    workers: Annotated[int, typer.Option(min=1, help="Runs of one rank that train beside each other.")] = 2,
    seeds: Annotated[int | None, typer.Option(min=2, help="Of each model that fails.")] = None,
    batch_windows: Annotated[int | None, typer.Option(min=1, help="Of an iteration of each model that fails.")] = None,
    policies: Annotated[
        str | None,
        typer.Option(
            help="By which models that fail are saved: sequential, load_aware, dynamic_k, moetion, window; some of "
            "them, comma-separated. By default sequential, and moetion with --full."
        ),
    ] = None,
    modes: Annotated[
        str | None,
        typer.Option(
            help="What becomes of experts that are older than the checkpoint: stale, more_capacity, catch_up, "
            "catch_up_whole, predict, predict_gain_1; some of them, comma-separated, and stale in any case. By default "
            "all."
        ),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Keeps finished runs with failures; by default runs/bench-experts.")
    ] = None,
    workdir: Workdir = None,
    json_path: JsonPath = None,
) -> None:
    """Sparse snapshots of a mixture of experts: bytes, tokens at risk, stall, and the lag after four failures."""
    from cpsr.benchmarks.experts.run import CACHE, FULL, QUICK
    from cpsr.benchmarks.experts.run import main as run_experts

    if quick and full:
        raise ConfigError("--quick and --full exclude each other: name one of them, or none for --quick")
    size = (FULL if full else QUICK).with_failing(
        seeds,
        batch_windows,
        None if policies is None else _comma_separated(policies),
        None if modes is None else _comma_separated(modes),
    )
    run_experts(json_path, size, _comma_separated(parts), workers, workdir, CACHE if cache is None else cache)


@bench.command("simulate")
def simulate_papers(
    subject: Annotated[str, typer.Argument(help="moevement, cpsr or planner.")],
    json_path: JsonPath = None,
) -> None:
    """Results of papers computed again by the simulator, or the planner against brute force; nothing is trained."""
    from cpsr.benchmarks.simulate.run import SUBJECTS
    from cpsr.benchmarks.simulate.run import main as run_simulations

    chosen = next((name for name in SUBJECTS if name == subject), None)
    if chosen is None:
        raise ConfigError(f"unknown subject {subject!r}; known are {', '.join(SUBJECTS)}")
    run_simulations(chosen, json_path)


def _lives_table(lives: "list[LifeRow]", causes: dict[int, str]) -> Table:
    table = Table("life", "mode", "restored at", "ending", "seconds", "process", title="Lives")
    for life in lives:
        killed = life.ending == "running" and life.life < lives[-1].life
        seconds = None if life.ended_unix_seconds is None else life.ended_unix_seconds - life.started_unix_seconds
        table.add_row(
            str(life.life),
            life.mode,
            "scratch" if life.restored_iteration is None else str(life.restored_iteration),
            escape(causes.get(life.life, "killed" if killed else life.ending)),
            _number(seconds),
            f"{life.pid} on {life.host}",
        )
    return table


def _checkpoints_table(checkpoints: "list[CheckpointRow]") -> Table:
    shown = checkpoints[-TABLE_ROWS_MAX:]
    title = (
        "Checkpoints" if len(shown) == len(checkpoints) else f"Newest {len(shown)} of {len(checkpoints)} checkpoints"
    )
    table = Table("iteration", "status", "bytes", "origin", "stall s", "reason", title=title)
    for row in shown:
        bytes_ = "-" if row.bytes is None else f"{row.bytes:,}"
        table.add_row(
            str(row.iteration), row.status, bytes_, row.origin, _number(row.stall_seconds), escape(row.reason)
        )
    return table


def _recoveries_table(recoveries: "list[RecoveryRow]") -> Table:
    table = Table("life", "failed at", "checkpoint", "restored at", "method", "outcome", title="Recoveries")
    for row in recoveries:
        iterations = (row.failure_iteration, row.checkpoint_iteration, row.restored_iteration)
        table.add_row(str(row.life), *("-" if at is None else str(at) for at in iterations), row.method, row.outcome)
    return table


def _rehearsals_table(rehearsals: "list[RehearsalRow]") -> Table:
    table = Table("failure at", "checkpoint", "outcome", "lag", "cost s", "reason", title="Rehearsals")
    for row in rehearsals[-TABLE_ROWS_MAX:]:
        error = row.lag_standard_error_iterations
        lag = "-" if row.lag_iterations is None else f"{row.lag_iterations:+.0f} ± {_number(error)}"
        iterations = str(row.failure_iteration), str(row.checkpoint_iteration)
        table.add_row(*iterations, row.outcome, lag, _number(row.cost_seconds), escape(row.reason))
    return table


def _comma_separated(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _number(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f}"


def main() -> None:
    """Entry point of the `cpsr` script."""
    app()
