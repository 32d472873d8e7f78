"""An unquantized model for the tests of the engine."""

from pathlib import Path

import pytest

from tests.models import save_llama, write_tokenizer


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a random Llama of two layers in bfloat16. Tests only read it."""
    sizes = {"num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 2}
    folder = save_llama(tmp_path_factory.mktemp("engine") / "bf16", **sizes)
    write_tokenizer(folder)
    return folder
