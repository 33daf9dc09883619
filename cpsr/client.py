"""The client of the service under the name that users import."""

from cpsr.service.client import Client

__all__ = ["Client"]
