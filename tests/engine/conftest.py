"""One unquantized model for all tests of the engine."""

from pathlib import Path

import pytest

from tests.engine.fixtures import write_model


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers in bfloat16; read it, never write to it."""
    return write_model(tmp_path_factory.mktemp("engine") / "bf16")
