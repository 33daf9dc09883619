"""One set of promises, kept by every kind of target."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cpsr.checkpoint.remote.place import LocalPlace, RemotePlace, TargetAbsentError, digest_of, open_place
from cpsr.errors import ConfigError, TargetError

FOLDER = "step-0000000010"


def test_what_is_written_is_there(url: str) -> None:
    place = open_place(url)
    assert place.folders() == []
    assert place.files(FOLDER) == []
    place.make(FOLDER)
    place.make(FOLDER)
    place.write(FOLDER, "COMMIT", b"first")
    place.write(FOLDER, "COMMIT", b"")
    place.write(FOLDER, "COMMIT", b"second")
    place.send(FOLDER, "large", iter([b"a" * 5_000_000, b"", b"b" * 3_000_000]))
    place.send(FOLDER, "empty", iter([]))
    assert place.folders() == [FOLDER]
    assert sorted(place.files(FOLDER)) == ["COMMIT", "empty", "large"]
    assert place.read(FOLDER, "COMMIT") == b"second"
    assert b"".join(place.chunks(FOLDER, "large")) == b"a" * 5_000_000 + b"b" * 3_000_000
    assert digest_of(place.chunks(FOLDER, "empty")).bytes == 0
    place.remove(FOLDER, first="COMMIT")
    assert place.folders() == []
    place.remove(FOLDER, first="COMMIT")


def test_what_is_absent_is_reported_so(url: str) -> None:
    place = open_place(url)
    with pytest.raises(TargetAbsentError, match=FOLDER):
        place.read(FOLDER, "COMMIT")
    place.make(FOLDER)
    with pytest.raises(TargetAbsentError, match="COMMIT"):
        list(place.chunks(FOLDER, "COMMIT"))


def test_only_folders_of_checkpoints_are_seen(url: str) -> None:
    place = open_place(url)
    for folder in (FOLDER, "step-10", "damaged-step-0000000010-0", "other"):
        place.make(folder)
        place.write(folder, "COMMIT", b"x")
    assert place.folders() == [FOLDER]


def test_an_error_of_the_sender_is_passed_on_and_nothing_has_the_name(tmp_path: Path) -> None:
    place = open_place(f"file://{tmp_path}/target")
    place.make(FOLDER)

    def failing() -> Iterator[bytes]:
        yield b"half"
        raise TargetError("of the sender")

    with pytest.raises(TargetError) as raised:
        place.send(FOLDER, "large", failing())
    assert str(raised.value) == "of the sender"
    assert "large" not in place.files(FOLDER)


def test_each_url_gets_its_kind(tmp_path: Path) -> None:
    assert isinstance(open_place(f"file://{tmp_path}"), LocalPlace)
    assert isinstance(open_place(str(tmp_path)), LocalPlace)
    assert isinstance(open_place("memory://x/y"), RemotePlace)


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
    assert isinstance(open_place(f"file://{tmp_path}/target", tmp_path / "run"), LocalPlace)


def test_the_folder_above_a_local_target_must_exist(tmp_path: Path) -> None:
    """A mount that is missing must not be filled underneath."""
    place = open_place(f"file://{tmp_path}/mount/target")
    assert place.folders() == []
    with pytest.raises(TargetAbsentError):
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
    with pytest.raises(TargetAbsentError):
        place.files(FOLDER)
    with pytest.raises(TargetAbsentError):
        place.read(FOLDER, "COMMIT")
    with pytest.raises(TargetError):
        place.write(FOLDER, "COMMIT", b"ours")
    with pytest.raises(TargetError):
        place.remove(FOLDER, first="COMMIT")
    assert (outside / "COMMIT").read_bytes() == b"of somebody else"
