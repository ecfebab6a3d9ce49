"""Fixtures of the recorded models."""

from tests.recorded import all_decided, llama, oracle

__all__ = ["all_decided", "llama", "oracle"]
