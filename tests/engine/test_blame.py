"""Faults that the unquantized model has too are not errors of the checkpoint."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.texts import assert_contains
from vexport.checks.vllm.groups import ConfigGroup
from vexport.engine.dry.causes import with_cause
from vexport.engine.dry.controls import control_kind, same_refusal
from vexport.engine.dry.load import errors_or_uncertainty, judge
from vexport.engine.loader_check import downgrade_errors
from vexport.engine.messages import Cell, CellResult, Control, ControlKind, Miscopy
from vexport.formats.schemes import get_scheme
from vexport.records import MESSAGE_SEPARATOR, Claim, DryLoadReport, Finding, LoaderFault
from vexport.rules.book import Rule

CELL = Cell(tp=1, sm=90)
REFUSED = CellResult(
    cell=CELL, outcome="refused", reason="KeyError: 'layers.1.mlp.gate.bias'", built=True
)
BIAS = "model.layers.1.mlp.experts.e_score_correction_bias"


def missing(where: str) -> Miscopy:
    return Miscopy(
        kind="missing", where=where, layer="", got="0 of 4 elements", expected="shape [4]"
    )


def with_control(
    result: CellResult,
    kind: ControlKind = "source",
    *,
    loads_elsewhere: bool = False,
    **changes: object,
) -> CellResult:
    """Return the result together with an unquantized control.

    The control has the same result, except for `changes`.
    """
    other = replace(
        result,
        reason=str(changes.get("reason", result.reason)),
        where=str(changes.get("where", result.where)),
    )
    control = Control(
        kind=kind,
        is_same=same_refusal(result, other),
        faults=result.faults,
        loads_elsewhere=loads_elsewhere,
    )
    return replace(result, control=control)


def judged(*results: CellResult, requested: bool = False) -> DryLoadReport:
    return judge("a", "0.32.0", results, "any", requested=requested)


@pytest.mark.parametrize("kind", ["source", "same config", "config alone", "default config"])
def test_shared_refusal_is_not_judged(kind: ControlKind) -> None:
    outcome = errors_or_uncertainty(judged(with_control(REFUSED, kind)))
    assert isinstance(outcome, str)
    assert REFUSED.reason in outcome
    assert outcome.startswith("vLLM")


@pytest.mark.parametrize(
    "result", [REFUSED, with_control(REFUSED, reason="ValueError: something else")]
)
def test_unshared_refusal_is_error(result: CellResult) -> None:
    outcome = errors_or_uncertainty(judged(result))
    assert isinstance(outcome, list)
    (error,) = outcome
    assert error.got == REFUSED.reason


@pytest.mark.parametrize(("requested", "is_error"), [(True, True), (False, False)])
def test_requested_cell_is_refused(requested: bool, is_error: bool) -> None:
    """The user named a GPU with --sm on which vLLM runs no checkpoint of this model."""
    result = with_control(REFUSED, loads_elsewhere=True)
    assert isinstance(errors_or_uncertainty(judged(result, requested=requested)), list) is is_error


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        ("no module layers.1.q_proj.weight_packed", "no module layers.1.q_proj.weight", True),
        ("KeyError: 'experts.w13_weight_scale'", "KeyError: 'experts.w13_weight'", True),
        ("cannot read /tmp/a/b.json", "cannot read /root/c.json", True),
        ("size of tensor a (128) and b (64)", "size of tensor a (128) and b (512)", True),
        ("no module layers.1.q_proj.weight", "no module layers.1.k_proj.weight", False),
        ("no such file", "no module layers.1.q_proj.weight", False),
    ],
)
def test_same_refusal(ours: str, theirs: str, same: bool) -> None:
    first, second = (replace(REFUSED, reason=text, where="") for text in (ours, theirs))
    assert same_refusal(first, second) is same
    assert not same_refusal(first, replace(second, outcome="loaded"))


def test_shared_fault_is_not_judged() -> None:
    own = missing("model.norm.weight")
    shared = CellResult(cell=CELL, outcome="loaded", faults=(missing(BIAS),))
    report = judged(replace(with_control(shared), faults=(missing(BIAS), own)))
    assert [finding.where for finding in report.findings] == [own.where]
    assert [entry.what for entry in report.not_judged] == [f"{BIAS} (missing)"]
    report = judged(with_control(shared))
    assert (report.ok, errors_or_uncertainty(report)) == (True, [])


def test_kind_of_control() -> None:
    loaded = CellResult(cell=CELL, outcome="loaded")
    faulty = replace(loaded, faults=(missing(BIAS),))
    assert control_kind(loaded, has_source=True) is None
    assert control_kind(faulty, has_source=True) == "source"
    assert control_kind(faulty, has_source=False) == "same config"
    assert control_kind(replace(REFUSED, built=False), has_source=False) == "config alone"


def finding(*faults: LoaderFault, claim: Claim = "values") -> Finding:
    return Finding.at(Rule("shapes/shape", claim=claim, loader_faults=faults), "a.weight")


STRETCHED = Miscopy(
    kind="stretched", where="a.weight", layer="", got="shape [1]", expected="shape [4]"
)


@pytest.mark.parametrize(
    ("found", "result", "stays"),
    [
        (finding("refused", claim="refused"), (), False),
        (finding("missing"), (), False),
        # A dry load shows no wrong values, and no refusal after loading.
        (finding(), (), True),
        (finding(claim="refused"), (), True),
        (finding("narrowed"), (STRETCHED,), True),
        # A fault that is not judged may have the same cause.
        (finding("refused", "missing"), (missing(BIAS),), True),
        (finding("narrowed"), (missing(BIAS),), False),
        (finding("narrowed"), (replace(missing(BIAS), kind="narrowed"),), True),
    ],
)
def test_loaders_overrule(found: Finding, result: Sequence[Miscopy], stays: bool) -> None:
    report = judged(with_control(CellResult(cell=CELL, outcome="loaded", faults=tuple(result))))
    (after,) = downgrade_errors([found], report)
    assert (after.severity == "error") is stays


NO_KERNEL = (
    "ValueError: Failed to find a kernel that can implement the WNA16 linear layer. Reasons: "
    "MacheteLinearKernel requires capability 90. MarlinLinearKernel cannot implement due to: int4b8"
)


def group(name: str) -> ConfigGroup:
    scheme = get_scheme(name)
    return ConfigGroup(
        name="group_0",
        targets=("Linear",),
        weights=scheme.args.weights,
        input_activations=scheme.args.input_activations,
        format=scheme.format.name,
    )


@pytest.mark.parametrize(
    ("scheme", "sm", "gpus", "is_shape"),
    [
        ("W4AFP8", (80,), " on SM 80", False),
        ("W4AFP8", (80, 89, 100), " on SM 80, 89 and 100", False),
        ("W4A16", (90,), " on SM 90", True),
    ],
)
def test_message_begins_with_cause(
    scheme: str, sm: Sequence[int], gpus: str, is_shape: bool
) -> None:
    """W4A16 has kernels for SM 90, so that the shapes of the layers are the cause."""
    message = with_cause(NO_KERNEL, sm, [group(scheme)], "0.32.0")
    cause, details = message.split(MESSAGE_SEPARATOR)
    assert details == NO_KERNEL
    assert_contains(cause, "no kernel", "vLLM 0.32", scheme)
    assert cause.endswith(gpus)
    assert ("shapes" in cause) is is_shape
    short = "ValueError: Unsupported activation: nonsense."
    assert with_cause(short, sm, [], "0.32.0") == short


CONFIG = "AttentionSelectorConfig(head_size=192, dtype=torch.bfloat16, use_mla={mla})"
# Objections of vLLM 0.32's attention backends to GLM-5 on SM 100.
SPARSE = {
    "FLASHINFER_MLA": ["head_size not supported", "sparse not supported"],
    "TOKENSPEED_MLA": [
        "head_size not supported",
        "sparse not supported",
        "tokenspeed_mla package is not installed. Install it with: `uv pip install tokenspeed-mla`",
    ],
    "TRITON_MLA": ["sparse not supported"],
    "FLASHMLA_SPARSE": ["head_size not supported", "kv_cache_dtype not supported"],
    "FLASHINFER_MLA_SPARSE": ["head_size not supported"],
}


@pytest.mark.parametrize(
    ("backends", "mla", "cause"),
    [
        (SPARSE, True, ": head_size 192 (kv_lora_rank + qk_rope_head_dim) not supported"),
        (
            {"FLASH_ATTN": ["head_size not supported"], "TRITON_ATTN": ["dtype not supported"]},
            False,
            ": FLASH_ATTN: head_size 192 not supported; "
            "TRITON_ATTN: dtype torch.bfloat16 not supported",
        ),
        (
            {"A_B": ["sinks not supported", "x"], "C_D": ["x", "needs hd in [64, 128] here"]},
            False,
            ": x",
        ),
        ({}, False, ""),
    ],
)
def test_attention_backends_are_summarized(
    backends: dict[str, list[str]], mla: bool, cause: str
) -> None:
    listed = ", ".join(f"{name}: [{', '.join(each)}]" for name, each in backends.items())
    words = "No valid attention backend found for cuda with "
    message = f"ValueError: {words}{CONFIG.format(mla=mla)}. Reasons: {{{listed}}}."
    shown = with_cause(message, (100,), [], "0.32.0").partition(MESSAGE_SEPARATOR)[0]
    assert_contains(shown, "no attention backend", "vLLM 0.32")
    assert shown.partition(" on SM 100")[2] == cause


def test_equal_causes_are_one_finding() -> None:
    reasons = [f"{NO_KERNEL} on SM {sm}" for sm in (80, 89)]
    cells = [Cell(tp=1, sm=sm) for sm in (80, 89)]
    refused = [
        replace(REFUSED, cell=cell, reason=reason)
        for cell, reason in zip(cells, reasons, strict=True)
    ]
    (found,) = judged(*refused).findings
    assert "on SM 80 and 89" in found.brief.got
    assert "Machete" not in found.brief.got
    assert "Machete" in found.got
