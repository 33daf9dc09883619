"""One set of promises, kept by every kind of target."""

from pathlib import Path

import pytest

from cpsr.checkpoint.files import hash_file
from cpsr.checkpoint.manifest import FileRecord
from cpsr.checkpoint.remote.place import CopyDamagedError, CopyStoppedError, open_place
from cpsr.errors import ConfigError, TargetError

FOLDER = "step-0000000010"


def test_what_is_written_is_there(tmp_path: Path, url: str) -> None:
    place = open_place(url)
    assert place.folders() == []
    assert place.files(FOLDER) == []
    place.make(FOLDER)
    place.make(FOLDER)
    place.write(FOLDER, "COMMIT", b"first")
    place.write(FOLDER, "COMMIT", b"")
    place.write(FOLDER, "COMMIT", b"second")
    (tmp_path / "large").write_bytes(b"a" * 5_000_000 + b"b" * 3_000_000)
    (tmp_path / "empty").touch()
    for name in ("large", "empty"):
        place.send(FOLDER, tmp_path / name)
    assert place.folders() == [FOLDER]
    assert sorted(place.files(FOLDER)) == ["COMMIT", "empty", "large"]
    assert place.read(FOLDER, "COMMIT") == b"second"
    for name in ("large", "empty"):
        found = hash_file(tmp_path / name)
        record = FileRecord(bytes=found.bytes, xxh3_128=found.xxh3_128)
        assert place.holds(FOLDER, name, record)
        assert not place.holds(FOLDER, name, FileRecord(bytes=found.bytes, xxh3_128="0" * 32))
        place.receive(FOLDER, name, record, tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == (tmp_path / name).read_bytes()
    place.remove(FOLDER, first="COMMIT")
    assert place.folders() == []
    place.remove(FOLDER, first="COMMIT")


def test_what_is_absent_is_reported_so(url: str) -> None:
    place = open_place(url)
    with pytest.raises(CopyDamagedError, match=FOLDER):
        place.read(FOLDER, "COMMIT")
    place.make(FOLDER)
    with pytest.raises(CopyDamagedError, match="COMMIT"):
        place.holds(FOLDER, "COMMIT", FileRecord(bytes=1, xxh3_128="0" * 32))


def test_a_stop_ends_what_is_sent_and_compared(tmp_path: Path, url: str) -> None:
    place = open_place(url)
    place.make(FOLDER)
    (tmp_path / "large").write_bytes(b"a" * 5_000_000)
    place.send(FOLDER, tmp_path / "large")
    place.stopped = lambda: True
    with pytest.raises(CopyStoppedError):
        place.send(FOLDER, tmp_path / "large")
    with pytest.raises(CopyStoppedError):
        place.holds(FOLDER, "large", FileRecord(bytes=5_000_000, xxh3_128="0" * 32))


def test_only_folders_of_checkpoints_are_seen(url: str) -> None:
    place = open_place(url)
    for folder in (FOLDER, "step-10", "damaged-step-0000000010-0", "other"):
        place.make(folder)
        place.write(folder, "COMMIT", b"x")
    assert place.folders() == [FOLDER]


def test_user_and_password_are_never_shown() -> None:
    place = open_place("memory://user:secret@x/run")
    assert place.shown == "memory://x/run"
    with pytest.raises(ConfigError) as refused:
        open_place("nosuchsystem://user:secret@x/run")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nosuchsystem://x", "nosuchsystem"),
        ("simplecache::memory://x", "chain of file systems"),
    ],
)
def test_urls_that_are_not_usable(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_place(url)


def test_a_target_and_a_run_directory_do_not_lie_in_one_another(tmp_path: Path) -> None:
    for target in (tmp_path, tmp_path / "run", tmp_path / "run" / "checkpoints", tmp_path / "x" / ".." / "run"):
        with pytest.raises(ConfigError, match="lie in one another"):
            open_place(f"file://{target}", tmp_path / "run")
    open_place(f"file://{tmp_path}/target", tmp_path / "run")


def test_the_folder_above_a_local_target_must_exist(tmp_path: Path) -> None:
    """A mount that is missing must not be filled underneath."""
    place = open_place(f"file://{tmp_path}/mount/target")
    assert place.folders() == []
    with pytest.raises(TargetError):
        place.make(FOLDER)
    assert not (tmp_path / "mount").exists()


def test_links_at_a_local_target_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "COMMIT").write_bytes(b"of somebody else")
    (tmp_path / "target" / "checkpoints").mkdir(parents=True)
    (tmp_path / "target" / "checkpoints" / FOLDER).symlink_to(outside)
    place = open_place(f"file://{tmp_path}/target")
    assert place.folders() == []
    with pytest.raises(TargetError):
        place.files(FOLDER)
    with pytest.raises(CopyDamagedError):
        place.read(FOLDER, "COMMIT")
    with pytest.raises(TargetError):
        place.write(FOLDER, "COMMIT", b"ours")
    with pytest.raises(TargetError):
        place.remove(FOLDER, first="COMMIT")
    assert (outside / "COMMIT").read_bytes() == b"of somebody else"
