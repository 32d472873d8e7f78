"""A model for the tests of plans."""

from pathlib import Path

import pytest

from tests.models import save_llama


@pytest.fixture(scope="session")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a Llama with 192 columns: groups of 64 and 32 fit, groups of 128 do not.

    o_proj and down_proj have 256 columns.
    """
    sizes = {"hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 2}
    return save_llama(tmp_path_factory.mktemp("narrow") / "model", **sizes)
