"""What `quantize` writes loads, or it says what to do."""

from pathlib import Path

import pytest

from tests.architectures.families import FAMILIES
from tests.architectures.matrix import SCHEMES, cells

# Outputs that vLLM or `check` still refuses: empty this set.
NOT_YET = {
    ("nemotron-h", "FP8_BLOCK"),
    ("granite-hybrid", "FP8_BLOCK"),
    *(("gemma4-vision", scheme) for scheme in SCHEMES),
}


@pytest.mark.vllm
@pytest.mark.slow
def test_every_family_is_written_as_it_loads_or_refused_with_advice_that_works(tmp_path: Path) -> None:
    wrong = {key: cell for key, cell in cells(FAMILIES, tmp_path).items() if not cell.startswith("loads")}
    assert {key: cell for key, cell in wrong.items() if key not in NOT_YET} == {}
