"""Ports and addresses: the service's, the one where ranks meet, and the one that other ranks connect to."""

import ipaddress
import os
import socket
from collections.abc import Mapping

from cpsr.config import ServiceConfig
from cpsr.doctor.finding import Finding, error, ok, warning
from cpsr.errors import ConfigError

__all__ = ["check_address", "check_rendezvous", "check_service_port"]

_PORT = 29500  # torchrun's, and `cpsr run`'s where several nodes name none
_OFF = "the service is off (service.enabled)"
_INTERFACE = "GLOO_SOCKET_IFNAME"


def check_service_port(config: ServiceConfig) -> Finding:
    """Whether the service can listen: its port, and its token where other machines may ask."""
    subject, place = "service port", f"{config.host} port {config.port}"
    try:
        from cpsr.service.access import Access, read_token
        from cpsr.service.server import bind
    except ModuleNotFoundError as problem:
        advice = f"training goes on without the service; install {problem.name}"
        return warning(subject, f"the service needs {problem.name}, which is not installed", advice, port=config.port)
    try:
        access = Access(read_token(config.token_file), config.allow_writes)
        bind(config.host, config.port, access).close()
    except ConfigError as problem:
        if config.enabled:
            advice = "training goes on without the service; see service.port and service.token_file"
            return warning(subject, str(problem), advice, port=config.port)
        return ok(subject, f"{problem}; {_OFF}", port=config.port)
    return ok(subject, f"{place} is free" + ("" if config.enabled else f"; {_OFF}"), port=config.port)


def check_rendezvous(environment: Mapping[str, str] = os.environ) -> Finding:
    """Whether the port where the ranks meet is free on this machine, before there are ranks."""
    text = environment.get("MASTER_PORT", "")
    port = int(text) if text.isdigit() else _PORT
    try:
        socket.create_server(("", port)).close()
    except (OSError, OverflowError) as problem:
        advice = f"ranks of several machines meet there: give another port to --rdzv-endpoint, or end what uses {port}"
        return warning("rendezvous port", f"port {port} cannot be listened on ({problem})", advice, port=port)
    return ok("rendezvous port", f"port {port} is free", port=port)


def check_address(name: str | None = None, environment: Mapping[str, str] = os.environ) -> Finding:
    """The address that gloo gives to the other ranks: of the interface that is named, or of the host name.

    Args:
        name: of this machine; None: its host name.
        environment: of this process.
    """
    subject, interface = "address", environment.get(_INTERFACE)
    if interface:
        missing = [one for one in interface.split(",") if one not in [known for _, known in socket.if_nameindex()]]
        if missing:
            return error(subject, f"{_INTERFACE} names {', '.join(missing)}", "there is none here; see `ip link`")
        return ok(subject, f"gloo takes {interface} ({_INTERFACE})", interface=interface)
    name = socket.gethostname() if name is None else name
    advice = f"give it one in /etc/hosts, or set {_INTERFACE} to the network's interface"
    try:
        address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
        with socket.socket(socket.AF_INET6 if ":" in str(address) else socket.AF_INET) as probe:
            probe.bind((str(address), 0))
    except OSError as problem:
        return warning(subject, f"{name} has no address of this machine ({problem})", advice, name=name)
    if ipaddress.ip_address(str(address).partition("%")[0]).is_loopback:
        text = f"{name} is {address}, which other machines cannot reach"
        return ok(subject, f"{text}: enough for one machine; for several {advice}", name=name, address=address)
    return ok(subject, f"{name} is {address}", name=name, address=address)
