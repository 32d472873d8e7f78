"""An error that the unquantized model has as well is not a fault of the quantization."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from vexport.records import Claim, Finding, Severity
from vexport.records.shared_faults import cause, cause_anywhere, shared_as_warnings

OUT, SOURCE = Path("/out"), Path("/models/source")
NO_PARAMETER = "a tensor for which vLLM has no parameter"
NO_TENSOR = "no such tensor"


def finding(
    where: str, got: str, claim: Claim = "refused", severity: Severity = "error"
) -> Finding:
    return Finding(
        check="completeness",
        claim=claim,
        severity=severity,
        where=where,
        expected="",
        got=got,
        fix="",
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        ("no 'a.b'. The parameters are: {'a.c', 'a.d'}", "no 'a.b'. The parameters are: {'z'}", 1),
        ("unexpected key; known: ['x.weight', 'y", "unexpected key; known: ['y.weight_scale']", 1),
        ("no 'a.b' in dict_keys(['q', 'r'])", "no 'a.b' in dict_keys([\"r\"])", 1),
        ("known names are a.b, c.d, e.f, g.h", "known names are e.f, a.b, c.d", 1),
        ("no 'a.b'. The parameters are: {'a.c'}", "no 'a.x'. The parameters are: {'a.c'}", 0),
        ("no backend. {FLASH: [head_size]}", "no backend. {FLASH: [kv_cache_dtype]}", 0),
    ],
)
def test_lists_are_no_cause(ours: str, theirs: str, same: bool) -> None:
    assert (cause(ours) == cause(theirs)) == same


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        ("no module 'tower.mlp.fc1'. Others: {'a'}", "no module 'tower.norm.up'", True),
        ("no module 'tower.mlp.fc1.weight_scale'", "no module 'tower.norm.up'", False),
        ("no module 'tower.mlp.fc1'", "no parameter 'tower.mlp.fc1'", False),
    ],
)
def test_cause_at_another_tensor(ours: str, theirs: str, same: bool) -> None:
    assert (cause_anywhere(ours) == cause_anywhere(theirs)) is same


@pytest.mark.parametrize(
    ("found", "in_source", "severities"),
    [
        # A layer that vLLM does not have, before and after its quantization.
        (
            [finding("adapter.weight_packed", NO_PARAMETER), finding("b.weight", NO_TENSOR)],
            [finding("adapter.weight", NO_PARAMETER)],
            ["warning", "error"],
        ),
        # The place is a file of the checkpoint or of the source.
        (
            [finding("/out/config.json: rope", "0")],
            [finding("/models/source/config.json: rope", "1")],
            ["warning"],
        ),
        # vLLM would load the quantized checkpoint in silence.
        (
            [finding("norm.weight", NO_TENSOR, "values")],
            [finding("norm.weight", NO_TENSOR, "values")],
            ["error"],
        ),
        # vLLM does not load it, because it refuses another tensor.
        (
            [finding("norm.weight", NO_TENSOR, "values"), finding("x.weight", NO_PARAMETER)],
            [finding("norm.weight", NO_TENSOR, "values"), finding("x.weight", NO_PARAMETER)],
            ["warning", "warning"],
        ),
        ([finding("a.weight", NO_PARAMETER)], [finding("a.weight", NO_TENSOR)], ["error"]),
        (
            [finding("a.weight", NO_PARAMETER)],
            [finding("a.weight", NO_PARAMETER, severity="warning")],
            ["error"],
        ),
    ],
)
def test_shared_errors_are_warnings(
    found: Sequence[Finding], in_source: Sequence[Finding], severities: list[str]
) -> None:
    after = shared_as_warnings(found, OUT, in_source, SOURCE)
    assert [each.severity for each in after] == severities


def test_values_are_warnings_if_loaders_refuse() -> None:
    missing = finding("norm.weight", NO_TENSOR, "values")
    (after,) = shared_as_warnings([missing], OUT, [missing], SOURCE, is_refused=True)
    assert after.severity == "warning"
    assert "unquantized model" in after.got
