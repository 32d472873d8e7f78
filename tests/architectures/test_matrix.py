"""What `quantize` writes loads, or it says what to do."""

from pathlib import Path

import pytest

from tests.architectures.families import FAMILIES
from tests.architectures.matrix import cells


@pytest.mark.vllm
@pytest.mark.slow
def test_every_family_is_written_as_it_loads_or_refused_with_advice_that_works(tmp_path: Path) -> None:
    found = cells(FAMILIES, tmp_path)
    assert {key: cell for key, cell in found.items() if not cell.startswith("loads")} == {}
