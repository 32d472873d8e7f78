"""Fixtures that several test modules share."""

import os
from pathlib import Path

import pytest

from tests.models import save_llama, write_calibration

# Tests run side by side: no engine may bind its threads to the same core as another.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A micro Llama checkpoint; read it, never write to it."""
    return save_llama(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="session")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration file for the micro models."""
    return write_calibration(tmp_path_factory.mktemp("calibration") / "rows.jsonl")
