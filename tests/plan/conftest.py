"""A model for all tests of plans."""

from pathlib import Path

import pytest

from tests.models import save_llama


@pytest.fixture(scope="session")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 192 columns: groups of 64 and 32 fit, 128 does not; o_proj and down_proj have
    256.
    """
    sizes = {"hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 2}
    return save_llama(tmp_path_factory.mktemp("narrow") / "model", **sizes)
