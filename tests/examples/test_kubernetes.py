"""The manifests: each field is one of its schema, and what they start leaves and comes back as they expect."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from cpsr.launch.command import ENVIRONMENT
from cpsr.ranks.exits import SIGTERM_STATUS
from cpsr.ranks.link import REFUSED_STATUS
from tests.launch.jobs import Launched
from tests.rank_processes import free_port

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "kubernetes"
MANIFESTS = [
    pytest.param(manifest, id=f"{path.stem}-{manifest['kind']}")
    for path in sorted(FOLDER.glob("*.yaml"))
    for manifest in yaml.safe_load_all(path.read_text())
]
KUBERNETES = ("1.31", "1.37")  # podFailurePolicy is stable since the first
NODES = 2
LAST = 1200


def manifest_of(name: str, kind: str) -> Any:
    return next(one for one in yaml.safe_load_all((FOLDER / name).read_text()) if one["kind"] == kind)


def job_of(manifest: Any) -> Any:
    """The template of the only replicated job of a JobSet, or of a runtime of Kubeflow Trainer."""
    spec = manifest["spec"]
    (job,) = (spec if manifest["kind"] == "JobSet" else spec["template"]["spec"])["replicatedJobs"]
    return job["template"]


def absent(given: Any, known: Any, place: str) -> list[str]:
    """Where `given` has a field that is not in `known`, which lacks what its models do not know, or another value."""
    if isinstance(given, dict) and isinstance(known, dict):
        return [one for key in given for one in absent(given[key], known.get(key), f"{place}.{key}")]
    if isinstance(given, list) and isinstance(known, list) and len(given) == len(known):
        return [one for i, pair in enumerate(zip(given, known, strict=True)) for one in absent(*pair, f"{place}[{i}]")]
    return [] if given == known else [place]


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_each_field_is_one_of_its_schema(manifest: Any) -> None:
    kind = manifest["kind"]
    if kind == "PodMonitor":
        pytest.skip("no Python package has its schema")
    kubernetes = pytest.importorskip("kubernetes_validate", reason="pip install -e '.[dev]'")
    if kind in ("JobSet", "TrainingRuntime", "TrainJob"):
        models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install -e '.[dev]'")
        group = {"JobSet": "JobsetV1alpha2"}.get(kind, "TrainerV1alpha1")
        api = {"JobSet": "jobset.x-k8s.io/v1alpha2"}.get(kind, "trainer.kubeflow.org/v1alpha1")
        assert manifest["apiVersion"] == api
        known = getattr(models, f"{group}{kind}").from_dict(manifest).to_dict()
        assert absent(manifest, known, kind) == []
        if kind == "TrainJob":
            return
        spec = {"completionMode": "Indexed", "completions": 1} | job_of(manifest)["spec"]  # as Trainer sets them
        manifest = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec}
    for version in KUBERNETES:
        kubernetes.validate(manifest, version, strict=True)


@pytest.mark.parametrize(("name", "kind"), [("jobset.yaml", "JobSet"), ("trainjob.yaml", "TrainingRuntime")])
def test_the_pods_of_a_job_are_what_recovery_needs(name: str, kind: str) -> None:
    job = job_of(manifest_of(name, kind))["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    statuses = {
        rule["action"]: rule["onExitCodes"]["values"]
        for rule in job["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule and rule["onExitCodes"]["containerName"] == container["name"]
    }
    assert statuses == {"FailJob": [REFUSED_STATUS], "Ignore": [SIGTERM_STATUS]}
    assert pod["restartPolicy"] == "Never"  # which a podFailurePolicy requires
    assert 30 < pod["terminationGracePeriodSeconds"] <= int(ENVIRONMENT["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    places = {one["mountPath"]: volumes[one["name"]] for one in container["volumeMounts"]}
    assert places["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert places["/runs"]["persistentVolumeClaim"]["claimName"] == "cpsr-runs"
    assert pod["securityContext"]["runAsNonRoot"]


def test_the_scrape_reaches_the_service_with_its_token() -> None:
    deployment, monitor = (manifest_of("service.yaml", kind) for kind in ("Deployment", "PodMonitor"))
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert endpoint["port"] in [port["name"] for port in container["ports"]]
    secrets = [one["secret"]["secretName"] for one in pod["spec"]["volumes"] if "secret" in one]
    assert secrets == [endpoint["authorization"]["credentials"]["name"]]
    assert f"--token-file=/token/{endpoint['authorization']['credentials']['key']}" in container["args"]


def pods(folder: Path) -> list[Launched]:
    """Start the launchers of a job of two pods of one rank each, with the arguments of its pods."""
    port, environment = free_port(), {"PYTHONPATH": str(ROOT)}
    (container,) = job_of(manifest_of("jobset.yaml", "JobSet"))["spec"]["template"]["spec"]["containers"]
    arguments = container["args"]
    here = {
        r"--nnodes=\d+": f"--nnodes={NODES}",
        r"--nproc-per-node=\d+": "--nproc-per-node=1",
        r"--rdzv-endpoint=.*": f"--rdzv-endpoint=localhost:{port}",
        r"/opt/cpsr/train\.py": str(ROOT / "examples" / "train.py"),
        r"--run-dir=/runs/(.*)": rf"--run-dir={folder}/\1",
        r"--iterations=\d+": f"--iterations={LAST}",
    }
    for pattern, replacement in here.items():
        arguments = [re.sub(f"^{pattern}$", replacement, one) for one in arguments]
    assert arguments[0] == "run"
    return [Launched(folder, ["cpsr", *arguments], environment) for _ in range(NODES)]


@pytest.mark.slow
def test_when_a_pod_is_evicted_all_leave_and_new_ones_go_on(tmp_path: Path) -> None:
    first, second = pods(tmp_path)
    with first, second:
        first.until(lambda launched: "iteration 200:" in launched.output + second.output)  # either has rank 0
        os.kill(second.process.pid, signal.SIGTERM)  # the kubelet's, to the first process of one pod
        assert [first.wait(), second.wait()] == [SIGTERM_STATUS, SIGTERM_STATUS]

    first, second = pods(tmp_path)
    with first, second:
        assert [first.wait(), second.wait()] == [0, 0]
        output = first.output + second.output
    back = re.search(r"All ranks continue at iteration (\d+), exact from checkpoint (\d+)", output)
    assert back is not None, output[-3000:]
    assert 200 <= int(back[1]) == int(back[2]) < LAST
    assert f"iteration {LAST}: loss" in output
