"""Layouts are tested through the copies that move them."""

from tests.worker.conftest import cpu_ops

__all__ = ["cpu_ops"]
