"""Losses of layer groups on the demo model, compared with checkpoints with one quantized group."""

from pathlib import Path

import numba
import pytest
import torch

from vexport.calibration import Samples, calibrate, read_samples
from vexport.calibration.attention import causal_attention
from vexport.calibration.model import build_on_meta
from vexport.calibration.walk import LayerWalk
from vexport.checkpoint.index import SourceIndex, read_index
from vexport.engine.reference import reference_logprobs
from vexport.formats.schemes import KEEP
from vexport.names import Folder
from vexport.plan.build import PlanSettings, build_plan
from vexport.quantize.job import QuantizeJob, quantize_source
from vexport.quantize.layer_groups import (
    LayerGroup,
    find_layer_groups,
    probe_plan,
    rules_with_schemes,
)
from vexport.quantize.sensitivity import measure
from vexport.records import CalibrationData, GroupSensitivities, OnProgress, SchemeLoss, silent
from vexport.records.calibration import Rounding
from vexport.scenario import Auto, Calibration, Rule

DEMO = Path(__file__).parents[2] / "scenarios" / "demo"
RULES = (Rule(match="Linear", scheme="auto"),)
SAMPLES = 2
# The reference computes attention and activations in another order, in bfloat16.
TOLERANCE = 0.02


def samples(model: Path) -> Samples:
    data = CalibrationData(name=str(DEMO / "calibration.jsonl"), samples=SAMPLES, seq_len=64)
    return read_samples(data, model, vocab_size=384)


def units_of(
    index: SourceIndex, *candidates: str, rules: tuple[Rule, ...] = RULES
) -> tuple[LayerGroup, ...]:
    auto = Auto(candidates=(*candidates, KEEP), share=0.5)
    return find_layer_groups(index, rules, auto, PlanSettings())


def run(
    model: Path,
    file: Path,
    *candidates: str,
    rules: tuple[Rule, ...] = RULES,
    on_progress: OnProgress = silent,
) -> GroupSensitivities:
    index, rows = read_index(model), samples(model)
    units = units_of(index, *candidates, rules=rules)
    plan = probe_plan(build_plan(index, rules_with_schemes((), {}, rules)), units)
    return measure(
        index,
        units,
        calibrate(LayerWalk(index), plan, rows),
        rows,
        file=file,
        on_progress=on_progress,
        trust_remote_code=False,
        device="cpu",
    )


def loss_of(model: Path, rules: tuple[Rule, ...], out: Path) -> float:
    """Return the KL of a checkpoint quantized by these rules."""
    settings = Calibration(data=DEMO / "calibration.jsonl", samples=SAMPLES, seq_len=64)
    quantize_source(
        QuantizeJob(source=Folder.at(model), out=out, rules=rules, calibration=settings)
    )
    # The reference has no log-probabilities after the last token of a prompt.
    prompts = [(*ids, 0) for ids in samples(model).token_ids]
    with causal_attention("cpu"):
        plain, quantized = reference_logprobs(model, prompts), reference_logprobs(out, prompts)
    assert torch.isfinite(quantized).all()
    return float((plain.exp() * (plain - quantized)).sum(-1).mean())


@pytest.fixture(scope="module")
def measured(
    tmp_path_factory: pytest.TempPathFactory, matmul_in_model_dtype_for_module: None
) -> GroupSensitivities:
    """Measure all losses with torch's matrix products, as in the reference.

    NVFP4 inputs depend on the last bits of these products.
    """
    folder = tmp_path_factory.mktemp("measured")
    return run(DEMO / "model-x16", folder / "trials.json", "NVFP4", "W4A16")


def losses(found: GroupSensitivities) -> dict[tuple[str, str], SchemeLoss]:
    return {
        (group.name, choice.scheme): choice for group in found.groups for choice in group.schemes
    }


def test_outliers_have_largest_losses(measured: GroupSensitivities) -> None:
    """model-x16 has scaled columns in q, k, v, gate and up. Their loss in INT4 is large."""
    easy, hard = list[float](), list[float]()
    for (name, scheme), loss in losses(measured).items():
        if scheme == "W4A16":
            (easy if name.endswith(("o_proj", "down_proj")) else hard).append(loss.loss)
    assert len(easy) == 6
    assert min(hard) > max(easy)


@pytest.mark.parametrize(
    ("name", "scheme"),
    [("model.layers.1.mlp.gate_up_proj", "NVFP4"), ("model.layers.0.self_attn.qkv_proj", "W4A16")],
)
def test_loss_equals_checkpoint_with_one_group(
    name: str, scheme: str, measured: GroupSensitivities, tmp_path: Path
) -> None:
    model = DEMO / "model-x16"
    (unit,) = (
        group for group in units_of(read_index(model), "NVFP4", "W4A16") if group.name == name
    )
    loss = loss_of(
        model, (*unit.rules(scheme), Rule(match="Linear", scheme=KEEP)), tmp_path / "one"
    )
    assert losses(measured)[name, scheme].loss == pytest.approx(loss, rel=TOLERANCE)


def test_losses_are_reused(tmp_path: Path) -> None:
    steps: list[str] = []

    def again(*candidates: str) -> GroupSensitivities:
        on_progress: OnProgress = lambda stage, done, total: steps.append(stage)  # noqa: E731
        return run(DEMO / "model", tmp_path / "trials.json", *candidates, on_progress=on_progress)

    first, ran = again("W4A16"), len(steps)
    assert ran == 4
    assert again("W4A16") == first
    assert len(steps) == ran
    assert again("W4A16", "FP8_DYNAMIC") != first
    assert len(steps) > ran


@pytest.mark.usefixtures("matmul_in_model_dtype")
def test_loss_follows_rounding(tmp_path: Path) -> None:
    """If no earlier layer is quantized, a refit equals GPTQ.

    Losses of another rounding in the file are not reused.
    """
    model, projection = DEMO / "model-x16", r"re:model\.layers\.0\.mlp\.down_proj"
    kept, found = Rule(match="Linear", scheme=KEEP), dict[str, float]()
    roundings: tuple[Rounding, Rounding] = ("refit", "nearest")
    for rounding in roundings:
        auto = Rule(match=projection, scheme="auto", rounding=rounding)
        (loss,) = losses(run(model, tmp_path / "trials.json", "W4A16", rules=(auto, kept))).values()
        found[rounding] = loss.loss
    gptq = Rule(match=projection, scheme="W4A16", observer="imatrix_mse", rounding="gptq")
    loss_of_gptq = loss_of(model, (gptq, kept), tmp_path / "one")
    assert found["refit"] == pytest.approx(loss_of_gptq, rel=TOLERANCE)
    assert found["nearest"] != pytest.approx(loss_of_gptq, rel=TOLERANCE)


def test_torch_uses_numbas_threads() -> None:
    """The number is set at the start, because sums depend on it."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(numba.get_num_threads() + 2)
        build_on_meta(DEMO / "model", trust_remote_code=False)
        assert torch.get_num_threads() == numba.get_num_threads()
    finally:
        torch.set_num_threads(before)
