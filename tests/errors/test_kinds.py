"""An exit code decides the class of an error that crossed a process."""

import pytest

from vexport.errors import (
    CheckpointFailed,
    EnvironmentFault,
    Inconclusive,
    InputError,
    VexportError,
    error_kind,
)


@pytest.mark.parametrize("kind", [CheckpointFailed, InputError, Inconclusive, EnvironmentFault])
def test_plain_kind_of_exit_code(kind: type[VexportError]) -> None:
    assert error_kind(kind.exit_code) is kind
