"""What SECURITY.md says: no file of a run directory is executed, and nothing leads out of it."""

import ast
import base64
import os
import pickle
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from cpsr import CPSRRecovery
from cpsr.benchmarks.harness.checkpoint_files import (
    checkpoint_files,
    commit_file,
    edit_commit,
    edit_part,
    rank_part,
    rest_file,
    slab_files,
    small_state_file,
    weights_file,
)
from cpsr.checkpoint.files import hash_file
from cpsr.checkpoint.store import CheckpointStore
from cpsr.cli.main import app
from cpsr.errors import CPSRError
from cpsr.export.command import run_export
from cpsr.service.access import Access
from cpsr.service.app import create_app
from cpsr.state.codec import decode
from tests.recovery.test_faults import Loop, config, life, loader

ROOT = Path(__file__).parents[1]
LIBRARY = ("cpsr", "predictor", "fitter", "service")
# Modules that can execute what they read, and functions of others that do.
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
UNSAFE_ATTRIBUTES = {
    ("torch", "load"),
    ("torch.jit", "load"),
    ("torch.package", "PackageImporter"),
    ("yaml", "load"),
    ("yaml", "full_load"),
    ("yaml", "unsafe_load"),
    ("numpy", "load"),
    ("pandas", "read_pickle"),
}
# Collectives of torch that unpickle what another rank sent.
UNPICKLING = re.compile(r"(all_gather|broadcast|gather|scatter|recv|send)_object(_list)?$")


def library() -> Iterator[Path]:
    # `cpsr/<x>` links to `<x>` at the top level: each file is visited once, under its own name.
    return (path for folder in LIBRARY for path in (ROOT / folder).rglob("*.py") if not _linked(path))


def _linked(path: Path) -> bool:
    return any(parent.is_symlink() for parent in path.parents if parent.is_relative_to(ROOT))


def unsafe(tree: ast.AST) -> Iterator[str]:
    """What a module imports or calls that can execute data."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in UNSAFE_MODULES)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module.split(".")[0] in UNSAFE_MODULES:
                yield module
            for alias in node.names:
                if (module, alias.name) in UNSAFE_ATTRIBUTES or UNPICKLING.match(alias.name):
                    yield f"{module}.{alias.name}"
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if (owner, node.attr) in UNSAFE_ATTRIBUTES or UNPICKLING.match(node.attr):
                yield f"{owner}.{node.attr}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in UNSAFE_CALLS:
            yield node.func.id


def test_no_module_of_the_library_can_execute_what_it_reads() -> None:
    paths = list(library())
    assert len(paths) > 100
    found = {path: list(unsafe(ast.parse(path.read_text(encoding="utf-8")))) for path in paths}
    assert {str(path.relative_to(ROOT)): set(names) for path, names in found.items() if names} == {
        "cpsr/hints/rewriting.py": {"compile"},
        "cpsr/hints/source.py": {"compile"},
    }


def test_what_is_compiled_is_the_source_of_a_loaded_function() -> None:
    """The text is what `inspect` finds for the code object that runs, and no module executes what is compiled."""
    tree = ast.parse((ROOT / "cpsr/hints/source.py").read_text(encoding="utf-8"))
    parsed = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "ast.parse"]
    assert [ast.unparse(one) for one in parsed] == ["ast.parse(''.join(inspect.findsource(code)[0]))"]


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import joblib.numpy_pickle",
        "from dill import loads",
        "from torch import load",
        "torch.load(path)",
        "yaml.load(text, Loader=yaml.Loader)",
        "dist.all_gather_object(found, value)",
        "from torch.distributed import broadcast_object_list",
        "eval(text)",
    ],
)
def test_what_executes_data_is_recognised(line: str) -> None:
    assert list(unsafe(ast.parse(line)))


def test_only_the_export_writes_pickles() -> None:
    """`torch.save` is allowed where DeepSpeed is to read the file, and nowhere else."""
    writers = {str(path.relative_to(ROOT)) for path in library() if "torch.save(" in path.read_text(encoding="utf-8")}
    assert writers == {"cpsr/export/universal.py"}


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return open, (str(self.marker), "w")


def plain_pickle(marker: Path, _: bytes) -> bytes:
    return pickle.dumps(Payload(marker))


def torch_archive(marker: Path, _: bytes) -> bytes:
    path = marker.with_name("archive")
    torch.save(Payload(marker), path)
    return path.read_bytes()


def behind_the_real_content(marker: Path, content: bytes) -> bytes:
    return content + pickle.dumps(Payload(marker))


DISGUISES = (plain_pickle, torch_archive, behind_the_real_content)


@pytest.fixture(scope="module")
def failed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that failed, with every kind of file that a run directory can hold."""
    run_dir = tmp_path_factory.mktemp("failed") / "run"
    life(run_dir, 11, crash=True)
    (run_dir / "ended.json").write_text('{"ending": "clean", "iteration": 9}')
    (run_dir / "prediction-failed.json").write_text('{"checkpoint_iteration": 3, "error": "x"}')
    events = run_dir / "events"
    events.mkdir(exist_ok=True)
    (events / "rank-00001.jsonl").write_text("")
    step = run_dir / "checkpoints" / "step-0000000003"
    edit_commit(step, lambda manifest: manifest.update(weights_only=True))
    aside = run_dir / "checkpoints" / "damaged-step-0000000001-1-0"
    aside.mkdir()
    (aside / "rank-00000-0.0.json").write_text("{}")
    cut_off = run_dir / "checkpoints" / "step-0000000010"
    cut_off.mkdir()
    for name in ("rank-00000.skip", "rank-00001.skip", "rank-00000-0.0.json"):
        (cut_off / name).write_text("{}")
    return run_dir


def kinds(run_dir: Path) -> list[str]:
    """Every file, by its name; of checkpoints the newest one's."""
    return sorted(str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file())


def read_by_everything(run_dir: Path, out: Path) -> None:
    """All that reads a run directory; a refusal is as good as a success."""
    service = create_app(run_dir, Access(allow_writes=True))
    client = TestClient(service, raise_server_exceptions=False, base_url="http://127.0.0.1")
    for path in service.openapi()["paths"]:
        if path != "/events":  # it would go on; what it reads is what the others read
            client.get(path)
    client.post("/plan/preview", json={})
    for command in (["inspect", str(run_dir)], ["inspect", str(run_dir), "--json"], ["verify", str(run_dir)]):
        result = CliRunner().invoke(app, command)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    for iteration in (None, 3):
        with suppress(CPSRError):
            run_export(run_dir, out / f"{iteration}.safetensors", "safetensors", "fp32", iteration)
    with suppress(CPSRError):  # reads the history, too, and what an exact restart reads
        life(run_dir, 13, crash=True, mode="predict")


def test_the_payload_works(tmp_path: Path) -> None:
    """Without this the tests below could not fail."""
    for number, disguise in enumerate((plain_pickle, torch_archive)):
        marker = tmp_path / f"marker-{number}"
        path = tmp_path / "file"
        path.write_bytes(disguise(marker, b""))
        if disguise is plain_pickle:
            pickle.loads(path.read_bytes())
        else:
            torch.load(path, weights_only=False)
        assert marker.exists()


def test_a_pickle_in_the_place_of_any_file_is_never_executed(failed_run: Path, tmp_path: Path) -> None:
    names = kinds(failed_run)
    assert {str(path.relative_to(failed_run)) for path in checkpoint_files(newest_step(failed_run))} <= set(names)
    for words in ("run.json", "journal", "ended", "prediction-failed", "events/", "progress/", "skip"):
        assert any(words in name for name in names), words
    marker = tmp_path / "marker"
    # One file of each kind alone (newest checkpoint), then all of them at once, in every disguise.
    parts = {str(path.relative_to(failed_run)) for path in checkpoint_files(newest_step(failed_run))}
    newest = [name for name in names if "checkpoints/" not in name or name in parts]
    cases = [([name], plain_pickle) for name in newest] + [(names, disguise) for disguise in DISGUISES]
    for number, (chosen, disguise) in enumerate(cases):
        run_dir = tmp_path / f"run-{number}"
        shutil.copytree(failed_run, run_dir)
        for name in chosen:
            (run_dir / name).write_bytes(disguise(marker, (run_dir / name).read_bytes()))
        read_by_everything(run_dir, tmp_path / f"out-{number}")
        assert not marker.exists(), chosen
        shutil.rmtree(run_dir)


def forge(step: Path, edit: Callable[[dict[str, Any]], None] = lambda record: None) -> None:
    """Change a rank's manifest, and make every hash up to the commit record fit, as whoever can write there could."""
    slabs = {path.name: path for path in slab_files(step)}

    def change(record: dict[str, Any]) -> None:
        edit(record)
        for name in record["files"].keys() & slabs.keys():
            record["files"][name] = hash_file(slabs[name]).model_dump()

    edit_part(step, change)


def newest_step(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / "step-0000000009"


@pytest.mark.parametrize("chosen", [weights_file, rest_file, small_state_file])
def test_a_pickle_with_hashes_that_fit_is_never_executed(
    failed_run: Path, tmp_path: Path, chosen: Callable[[Path], Path]
) -> None:
    marker, run_dir = tmp_path / "marker", tmp_path / "run"
    shutil.copytree(failed_run, run_dir)
    chosen(newest_step(run_dir)).write_bytes(plain_pickle(marker, b""))
    forge(newest_step(run_dir))
    read_by_everything(run_dir, tmp_path / "out")
    assert not marker.exists()


def test_learned_state_that_is_a_pickle_stays_bytes(failed_run: Path, tmp_path: Path) -> None:
    """Everything in the small state replaced: what was learned, registered objects, random states, the engine's."""
    marker, run_dir = tmp_path / "marker", tmp_path / "run"
    payload = {"__cpsr__": "bytes", "data": base64.b64encode(plain_pickle(marker, b"")).decode()}
    for name in ("learned", "registered", "rng", "engine", "probes", "planning"):
        shutil.copytree(failed_run, run_dir)
        content = {"state": payload} if name in ("learned", "registered", "planning") else payload

        def place(record: dict[str, Any], name: str = name, content: Any = content) -> None:
            record["scalars"][name] = content

        forge(newest_step(run_dir), place)
        loop = Loop()
        with suppress(Exception), CPSRRecovery(loop.adapter, config(run_dir, mode="predict")) as recovery:
            for x, y in recovery.resume(loader(), repeat=True):
                loop.step(loop.model(x, y))
                break
        assert not marker.exists(), name
        shutil.rmtree(run_dir)


def test_arrays_of_objects_are_not_built_from_bytes() -> None:
    address = base64.b64encode(struct.pack("P", id(numpy))).decode()
    with pytest.raises(ValueError, match="OBJECT"):
        decode({"__cpsr__": "scalar", "dtype": "|O", "data": address}, {})


NAMES = [
    "../outside",
    "/etc/passwd",
    "{}/../../outside",
    "..",
    "{}\n",
]


@pytest.mark.parametrize("name", NAMES)
def test_names_in_manifests_cannot_leave_the_directory(failed_run: Path, tmp_path: Path, name: str) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(failed_run, run_dir)
    outside = run_dir / "checkpoints" / "outside"
    weights = weights_file(newest_step(run_dir))
    outside.write_bytes(weights.read_bytes())

    def rename(record: dict[str, Any]) -> None:
        record["files"][name.format(weights.name)] = record["files"].pop(weights.name)

    forge(newest_step(run_dir), rename)
    result = CliRunner().invoke(app, ["verify", str(run_dir)])
    assert result.exit_code == 1
    assert re.search(r"(COMMIT|rank-00000\.json): is refused", result.stdout)
    recovery, _ = life(run_dir, 13, crash=True)
    assert recovery.restored.checkpoint_iteration == 6
    assert outside.exists()


def test_a_step_that_is_a_link_is_neither_read_nor_written_nor_emptied(failed_run: Path, tmp_path: Path) -> None:
    """The run's directory may lie behind links; its steps may not."""
    run_dir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    shutil.copytree(failed_run, run_dir)
    newest_step(run_dir).rename(elsewhere)
    newest_step(run_dir).symlink_to(elsewhere)
    shutil.copytree(elsewhere, tmp_path / "uncommitted", ignore=shutil.ignore_patterns(commit_file(elsewhere).name))
    for name in ("step-0000000002", "step-0000000012", "abandoned-step-0000000001-1-0"):
        (run_dir / "checkpoints" / name).symlink_to(tmp_path / "uncommitted")
    before = {
        path: path.read_bytes() for folder in ("elsewhere", "uncommitted") for path in (tmp_path / folder).iterdir()
    }
    verified = CliRunner().invoke(app, ["verify", str(run_dir)])
    assert verified.stdout.count("is a symbolic link, and never followed") == 3
    recovery, _ = life(run_dir, 40, crash=True)  # saves at 9 and 12 meanwhile, and retention passes
    assert recovery.restored.checkpoint_iteration == 6
    after = {
        path: path.read_bytes() for folder in ("elsewhere", "uncommitted") for path in (tmp_path / folder).iterdir()
    }
    assert after == before


@pytest.mark.parametrize("chosen", [rank_part, weights_file])
def test_a_file_that_is_a_link_is_damage(failed_run: Path, tmp_path: Path, chosen: Callable[[Path], Path]) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(failed_run, run_dir)
    file = chosen(newest_step(run_dir))
    file.rename(tmp_path / "outside")
    file.symlink_to(tmp_path / "outside")
    result = CliRunner().invoke(app, ["verify", str(run_dir)])
    assert result.exit_code == 1
    assert f"{file.name}: cannot be read" in result.stdout


def test_counters_and_event_files_are_not_written_through_links(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from cpsr.checkpoint.progress import ProgressCounter
    from cpsr.journal import EventFile, EventRow

    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("mine, and longer than a counter of 32 bytes")
    link.symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        ProgressCounter(link)
    EventFile(link).record(EventRow(life=0, rank=1, kind="note", message="an event"))
    assert "symbolic links" in caplog.text
    assert target.read_text() == "mine, and longer than a counter of 32 bytes"


def test_who_may_read_is_decided_by_the_umask(tmp_path: Path) -> None:
    """Nothing is opened wider than the umask says, and nothing is executable."""
    before = os.umask(0o077)
    try:
        life(tmp_path / "run", 4)
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in (tmp_path / "run").rglob("*")}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}


def test_the_store_refuses_a_link_by_name(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 0, 1, "run", 1)
    store.prepare()
    (store.directory / "step-0000000005").symlink_to(tmp_path)
    with pytest.raises(CPSRError, match=r"step-0000000005 is a symbolic link.*remove the link"):
        store.skip(5, "for a test")
