"""The identity of a run, as it goes with every copy."""

import json
from pathlib import Path

import pytest

from cpsr.checkpoint.remote.identity import Identity, read_identity
from tests.checkpoint.remote.conftest import IDENTITY


def test_it_comes_back_with_everything_that_was_in_it(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(IDENTITY))
    identity = read_identity(tmp_path)
    assert identity is not None
    again = Identity.parse(identity.to_bytes())
    assert again == identity
    assert json.loads(json.dumps(again.model_dump())) == IDENTITY


def test_every_byte_of_it_is_covered() -> None:
    data = Identity.model_validate(IDENTITY).to_bytes()
    for at in range(len(data)):
        with pytest.raises(ValueError, match=r".+"):
            Identity.parse(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(ValueError, match=r".+"):
            Identity.parse(data[:at])


@pytest.mark.parametrize("run_id", ["../../x", "a/b", "", "a" * 65, "a\n"])
def test_an_id_is_no_path(run_id: str) -> None:
    with pytest.raises(ValueError, match="run_id"):
        Identity.model_validate(IDENTITY | {"run_id": run_id})


def test_a_directory_without_one_has_none(tmp_path: Path) -> None:
    assert read_identity(tmp_path) is None
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ValueError, match="Expecting"):
        read_identity(tmp_path)
