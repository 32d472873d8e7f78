"""The names of a checkpoint's schemes."""

from pathlib import Path

import pytest

from tests.models import Good
from vexport.checks.vllm.stored_schemes import stored_schemes


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8", "NVFP4A16", "FP8_BLOCK"])
def test_stored_schemes_of_presets(good: Good, scheme: str) -> None:
    assert stored_schemes(good(scheme)) == (scheme,)


def test_no_schemes_without_quantization(llama: Path) -> None:
    assert stored_schemes(llama) == ()
