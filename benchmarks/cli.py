"""The `cpsr bench` commands; everything heavy is imported inside its own command."""

from pathlib import Path
from typing import Annotated

import typer

from cpsr.demo.device import Device, find_device
from cpsr.errors import ConfigError
from cpsr.ranks.exits import exiting_at_signals

__all__ = ["DeviceOption", "bench"]

bench = typer.Typer(no_args_is_help=True)

JsonPath = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")]
DeviceOption = Annotated[Device, typer.Option("--device", help="Where to train; auto is CUDA where torch finds a GPU.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes of one thread; by default up to 2.")]
Workdir = Annotated[Path | None, typer.Option(help="On the disk to be measured; emptied again. By default /tmp.")]


@bench.callback()
def end_together(context: typer.Context) -> None:
    """Measure what checkpoints and failures cost."""
    context.with_resource(exiting_at_signals(_end_children))


def _end_children() -> None:
    """End the processes that a benchmark has started, which SIGTERM to this one does not reach."""
    import psutil

    for process in psutil.Process().children(recursive=True):
        process.kill()


@bench.command()
def stall(
    json_path: JsonPath = None,
    pairs: Annotated[int, typer.Option(min=1, help="Checkpoints per method and size.")] = 30,
    workdir: Workdir = None,
    device: DeviceOption = Device.AUTO,
) -> None:
    """What a checkpoint costs the training thread and the memory of the host, beside other packages' checkpoints."""
    from cpsr.benchmarks.stall.run import main as run_stall

    run_stall(json_path=json_path, pairs=pairs, workdir=workdir, device=find_device(device))


@bench.command()
def drill(
    json_path: JsonPath = None,
    cache: Annotated[Path | None, typer.Option(help="Keeps complete runs; by default runs/bench-drill.")] = None,
    jobs: Annotated[str, typer.Option(help="ddp (2 ranks), fsdp2 (4 ranks): comma-separated.")] = "ddp,fsdp2",
    only: Annotated[str, typer.Option(help="Ways to come back, or how their names begin, comma-separated.")] = "",
    workdir: Workdir = None,
) -> None:
    """One job under the same failures with CPSR and with other packages: hours; interrupt it and go on at will."""
    from cpsr.benchmarks.drill.run import main as run_drill
    from cpsr.benchmarks.drill.run import selected

    run_drill(json_path, cache, *selected(jobs, only), workdir)


@bench.command()
def reshard(
    json_path: JsonPath = None,
    rounds: Annotated[int, typer.Option(min=2, help="Loads of each kind.")] = 5,
    workdir: Workdir = None,
    layers: Annotated[int, typer.Option(min=1, help="Of the model of 1024 columns; fewer need less memory.")] = 24,
) -> None:
    """Loading a checkpoint on another number of ranks, beside the same number and torch's DCP."""
    from cpsr.benchmarks.reshard.run import main as run_reshard

    run_reshard(json_path, rounds, workdir, layers)


@bench.command()
def overhead(
    json_path: JsonPath = None,
    full: Annotated[bool, typer.Option("--full", help="More and longer runs: about 10 minutes.")] = False,
    workdir: Workdir = None,
    device: DeviceOption = Device.AUTO,
) -> None:
    """Extra time of training steps without a checkpoint."""
    from cpsr.benchmarks.overhead.run import DEFAULT, FULL
    from cpsr.benchmarks.overhead.run import main as run_overhead

    run_overhead(json_path, FULL if full else DEFAULT, workdir, find_device(device))


@bench.command()
def cadence(
    json_path: JsonPath = None,
    workdir: Workdir = None,
    kills: Annotated[int, typer.Option(min=1, help="Killed jobs for each interval.")] = 8,
) -> None:
    """What snapshots to host memory cost a step, and what a kill of all processes then loses."""
    from cpsr.benchmarks.cadence.run import Size
    from cpsr.benchmarks.cadence.run import main as run_cadence

    run_cadence(json_path, Size(kills=kills), workdir)


@bench.command()
def durable(
    json_path: JsonPath = None,
    workdir: Workdir = None,
) -> None:
    """Processor time and time until a checkpoint is durable and verified, beside a raw write and read."""
    from cpsr.benchmarks.durable.run import main as run_durable

    run_durable(json_path, workdir=workdir)


@bench.command()
def scale(
    json_path: JsonPath = None,
    workdir: Workdir = None,
    ranks: Annotated[str, typer.Option(help="Numbers of simulated ranks, comma-separated.")] = "256,1024,4096",
    processes: Annotated[str, typer.Option(help="Numbers of real ones, comma-separated.")] = "2,4,8,16,32",
) -> None:
    """What grows with the number of ranks: commits, restarts, heartbeats and events through files, and groups."""
    from cpsr.benchmarks.scale.run import main as run_scale

    run_scale(json_path, workdir, *(sorted(map(int, numbers.split(","))) for numbers in (ranks, processes)))


@bench.command()
def replay(
    json_path: JsonPath = None,
    parts: Annotated[str, typer.Option(help="What is measured, comma-separated.")] = "windows,stages,repeated",
    workdir: Workdir = None,
) -> None:
    """What sparse windows of snapshots cost each step, and what a repeated step costs."""
    from cpsr.benchmarks.replay.run import main as run_replay

    run_replay(json_path, workdir=workdir, parts=parts.split(","))


@bench.command()
def hints(
    json_path: JsonPath = None,
    rounds: Annotated[int, typer.Option(min=1, help="In each, every loop runs and is killed.")] = 3,
    workdir: Workdir = None,
) -> None:
    """What a failure of a resumable function repeats, and what its checkpoints cost, beside even distances."""
    from cpsr.benchmarks.hints.run import Size
    from cpsr.benchmarks.hints.run import main as run_hints

    run_hints(json_path, Size(rounds=rounds), workdir)


@bench.command()
def recovery(
    quick: Annotated[
        bool, typer.Option("--quick", help="A subset of about 10 minutes on two cores; the default.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="The whole grid: hours; interrupt it and go on at will.")
    ] = False,
    points: Annotated[int | None, typer.Option(min=1, help="Failure points in each cell and seed.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Training runs of each workload.")] = None,
    workloads: Annotated[str | None, typer.Option(help="Names, comma-separated.")] = None,
    methods: Annotated[str | None, typer.Option(help="Names, comma-separated.")] = None,
    intervals: Annotated[str | None, typer.Option(help="Iterations between checkpoints, comma-separated.")] = None,
    lost: Annotated[
        str | None, typer.Option(help="Parts of the state: all, 1/2 to 1/16 (shards), stage; comma-separated.")
    ] = None,
    workers: Workers = None,
    cache: Annotated[Path | None, typer.Option(help="Keeps what was trained; by default runs/bench-recovery.")] = None,
    json_path: JsonPath = None,
    device: DeviceOption = Device.AUTO,
) -> None:
    """What a failure costs by the end of the training, by every way to come back, on paired data."""
    from cpsr.benchmarks.recovery.run import main as run_recovery
    from cpsr.benchmarks.recovery.selection import selection

    if quick and full:
        raise ConfigError("--quick and --full exclude each other: name one of them, or none for --quick")
    chosen = selection(full, points, seeds, workloads, methods, intervals, lost, find_device(device))
    run_recovery(chosen, cache, json_path, workers)


@bench.command()
def tune(
    tasks: Annotated[str | None, typer.Option(help="Names, comma-separated; by default all.")] = None,
    schedules: Annotated[str, typer.Option(help="cosine, cosine10, wsd: comma-separated.")] = "cosine,cosine10,wsd",
    optimizers: Annotated[str, typer.Option(help="adamw, sgd, muon: comma-separated.")] = "adamw",
    seeds: Annotated[int, typer.Option(min=1, help="Trainings at each rate.")] = 3,
    workers: Workers = None,
    cache: Annotated[Path | None, typer.Option(help="Keeps every training; by default runs/bench-tune.")] = None,
    json_path: JsonPath = None,
    device: DeviceOption = Device.AUTO,
) -> None:
    """The peak learning rate at which trainings end best: their final loss in steps of 1.4 around it."""
    from cpsr.benchmarks.recovery.tune import main as run_tune
    from cpsr.benchmarks.recovery.tune import settings

    run_tune(settings(tasks, schedules, optimizers), seeds, cache, json_path, workers, find_device(device))


@bench.command()
def prior(
    failures: Annotated[int, typer.Option(min=0, help="Failures of each run; 0 only fits what is there.")] = 0,
    data: Annotated[Path | None, typer.Option(help="Directory of the measured recoveries.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Keeps what was trained; by default runs/bench-prior.")] = None,
    workers: Workers = None,
    table: Annotated[Path | None, typer.Option(help="Write the fitted table here.")] = None,
    json_path: JsonPath = None,
) -> None:
    """Measure recoveries with many settings on runs of their own, and fit the predictor's prior table to them."""
    from cpsr.benchmarks.recovery.prior import main as run_prior

    run_prior(failures, data, cache, table, json_path, workers)


@bench.command()
def network(
    weights: Annotated[Path, typer.Option(help="Where the network's weights go.")],
    cache: Annotated[Path | None, typer.Option(help="Keeps what was trained; by default runs/bench-prior.")] = None,
    workers: Workers = None,
) -> None:
    """Pretrain the predictor's network on the prior's runs; `bench recovery --methods predicted` judges it."""
    from cpsr.benchmarks.recovery.network import main as run_network

    run_network(weights, cache, workers)


@bench.command()
def predictor(
    methods: Annotated[str, typer.Option(help="default, line, vitp: comma-separated.")] = "default",
    workdir: Workdir = None,
    json_path: JsonPath = None,
    device: DeviceOption = Device.AUTO,
) -> None:
    """Memory and speed of prediction over a history on disk, beside reading it and beside training."""
    from cpsr.benchmarks.predictor_cost.run import main as run_predictor

    run_predictor(methods, workdir=workdir, json_path=json_path, device=find_device(device))


@bench.command()
def faults(
    only: Annotated[
        str,
        typer.Option(
            help="Parts, or how their names begin, comma-separated; by default all. `live` is real jobs, `replay` "
            "such with windows, `sparse` all with sparse checkpoints."
        ),
    ] = "",
    sample: Annotated[bool, typer.Option("--sample", help="What every change is tested with, in minutes.")] = False,
    seed: Annotated[int, typer.Option(help="With which scenarios of real jobs are drawn.")] = 0,
    json_path: JsonPath = None,
    workdir: Workdir = None,
) -> None:
    """Kill, refuse and damage the checkpoint store at every point, then real jobs by signals; restart after each."""
    from cpsr.benchmarks.faults.run import main as run_faults
    from cpsr.benchmarks.faults.selection import select

    run_faults(select(only, seed, sample=sample), json_path, workdir)


@bench.command()
def service(
    json_path: JsonPath = None,
    workdir: Workdir = None,
) -> None:
    """How fast the service says what the plan is over a long run's journal beside training, and its memory."""
    from cpsr.benchmarks.service.run import main as run_service_benchmark

    run_service_benchmark(json_path, workdir=workdir)


@bench.command()
def verification(
    json_path: JsonPath = None,
    rounds: Annotated[int, typer.Option(min=1, help="Faults of each kind in each job.")] = 4,
    workdir: Workdir = None,
) -> None:
    """Which flipped bits the repetition of a step finds, on which rank, and what it costs."""
    from cpsr.benchmarks.verification.run import main as run_verification

    run_verification(json_path, rounds, workdir=workdir)


@bench.command()
def experts(
    json_path: JsonPath = None,
    full: Annotated[
        bool, typer.Option("--full", help="Also measure copies that ranks share, and updates by a replica's holder.")
    ] = False,
) -> None:
    """Bytes of snapshots of a mixture of experts beside the papers."""
    from cpsr.benchmarks.experts.run import main as run_experts

    run_experts(json_path, full=full)


@bench.command()
def simulate(
    spec: Annotated[Path | None, typer.Option(help="Describes a job, its failures and policies; YAML.")] = None,
    json_path: JsonPath = None,
) -> None:
    """What failures cost a described job, by checkpoint policy; or, without one, the planner against brute force."""
    from cpsr.benchmarks.simulate.run import main as run_simulations

    run_simulations(spec, json_path)
