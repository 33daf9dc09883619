"""Ports that are free or taken, and names that have addresses or none."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpsr.config import ServiceConfig
from cpsr.doctor.ports import check_address, check_rendezvous, check_service_port


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def free() -> int:
    with socket.create_server(("", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def test_the_port_of_the_service(taken: int, free: int) -> None:
    assert check_service_port(ServiceConfig(enabled=True, port=free)).level == "ok"
    found = check_service_port(ServiceConfig(enabled=True, port=taken))
    assert found.level == "warning"
    assert str(taken) in found.measured
    assert "service.port" in found.advice
    off = check_service_port(ServiceConfig(port=taken))
    assert (off.level, "the service is off" in off.measured) == ("ok", True)
    with socket.create_server(("127.0.0.1", free)):  # what was tried is free again
        pass


def test_a_machine_without_fastapi_is_told_so() -> None:
    code = (
        "import sys; sys.modules['fastapi'] = None\n"
        "import cpsr.doctor.command\n"
        "from cpsr.config import ServiceConfig\n"
        "from cpsr.doctor.ports import check_service_port\n"
        "found = check_service_port(ServiceConfig(enabled=True)); print(found.level, found.measured)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "warning the service needs fastapi, which is not installed\n", done.stderr


def test_a_service_for_other_machines_needs_a_token(free: int, tmp_path: Path) -> None:
    found = check_service_port(ServiceConfig(enabled=True, host="0.0.0.0", port=free))
    assert found.level == "warning"
    assert "without a token" in found.measured
    (tmp_path / "token").write_text("0123456789abcdefghij")
    settings = ServiceConfig(enabled=True, host="0.0.0.0", port=free, token_file=tmp_path / "token")
    assert check_service_port(settings).level == "ok"
    absent = ServiceConfig(enabled=True, port=free, token_file=tmp_path / "absent")
    assert "absent" in check_service_port(absent).measured


def test_the_port_where_ranks_meet(taken: int, free: int) -> None:
    assert check_rendezvous({"MASTER_PORT": str(free)}).level == "ok"
    found = check_rendezvous({"MASTER_PORT": str(taken)})
    assert found.level == "warning"
    assert "--rdzv-endpoint" in found.advice
    assert check_rendezvous({}).figures["port"] == 29500


def test_names_and_interfaces() -> None:
    assert check_address("localhost", {}).level == "ok"
    assert "other machines cannot reach" in check_address("localhost", {}).measured
    found = check_address("no-such-name.invalid", {})
    assert found.level == "warning"
    assert "GLOO_SOCKET_IFNAME" in found.advice
    elsewhere = check_address("192.0.2.1", {})  # an address of documentation
    assert elsewhere.level == "warning"
    assert check_address(environment={"GLOO_SOCKET_IFNAME": "lo"}).level == "ok"
    assert check_address(environment={"GLOO_SOCKET_IFNAME": "nowhere0"}).level == "error"
