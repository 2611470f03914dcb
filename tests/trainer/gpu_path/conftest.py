"""What several of these tests need."""

from __future__ import annotations

from tests.one_process import one_process

__all__ = ["one_process"]  # a fixture
