"""Losses of groups on the demo model: those of a checkpoint in which only that group is quantized."""

from pathlib import Path

import numba
import pytest
import torch

from vexport.calibration import Samples, calibrate, read_samples
from vexport.calibration.model import build_on_meta
from vexport.calibration.walk import LayerWalk
from vexport.checkpoint.index import SourceIndex, read_index
from vexport.engine.reference import reference_logprobs
from vexport.formats.schemes import KEEP
from vexport.plan.build import PlanSettings, build_plan
from vexport.quantize.job import QuantizeJob, quantize_source
from vexport.quantize.layer_groups import LayerGroup, find_layer_groups, probe_plan, rules_with
from vexport.quantize.measure import measure
from vexport.records import CalibrationData, GroupSensitivities, SchemeLoss
from vexport.records.calibration import Rounding
from vexport.scenario import Auto, Calibration, Rule

DEMO = Path(__file__).parents[2] / "scenarios" / "demo"
RULES = (Rule(match="Linear", scheme="auto"),)
SAMPLES = 2
# The reference computes attention and activations in another order, in bf16.
TOLERANCE = 0.02


def samples(model: Path, number: int = SAMPLES) -> Samples:
    data = CalibrationData(name=str(DEMO / "calibration.jsonl"), samples=number, seq_len=64)
    return read_samples(data, model, vocab_size=384)


def units_of(index: SourceIndex, *candidates: str, rules: tuple[Rule, ...] = RULES) -> tuple[LayerGroup, ...]:
    auto = Auto(candidates=(*candidates, KEEP), share=0.5)
    return find_layer_groups(index, rules, auto, PlanSettings())


def run(model: Path, file: Path, *candidates: str, steps: list[str] | None = None) -> GroupSensitivities:
    index = read_index(model)
    units = units_of(index, *candidates)
    plan = build_plan(index, rules_with((), {}, RULES))
    return measure(
        index,
        units,
        calibrate(LayerWalk(index), probe_plan(plan, units), samples(model)),
        samples(model),
        file=file,
        on_progress=lambda stage, done, total: (steps if steps is not None else []).append(stage),
        trust_remote_code=False,
        device="cpu",
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, own_products_in_module: None) -> GroupSensitivities:
    """Computed as the reference does: what NVFP4 makes of inputs depends on their last bits."""
    folder = tmp_path_factory.mktemp("measured")
    return run(DEMO / "model-x16", folder / "trials.json", "NVFP4", "W4A16")


def losses(found: GroupSensitivities) -> dict[tuple[str, str], SchemeLoss]:
    return {(group.name, one.scheme): one for group in found.groups for one in group.schemes}


def test_the_outliers_are_found(measured: GroupSensitivities) -> None:
    """The variant scales columns of q, k, v, gate and up only: INT4 in groups of 128 loses those."""
    found = losses(measured)
    hard = [
        one.loss
        for (name, scheme), one in found.items()
        if scheme == "W4A16" and "_proj" in name and ("qkv" in name or "gate_up" in name)
    ]
    easy = [
        one.loss
        for (name, scheme), one in found.items()
        if scheme == "W4A16" and ("o_proj" in name or "down" in name)
    ]
    assert len(hard) == len(easy) == 6
    assert min(hard) > max(easy)


@pytest.mark.parametrize(
    ("name", "scheme"),
    [("model.layers.1.mlp.gate_up_proj", "NVFP4"), ("model.layers.0.self_attn.qkv_proj", "W4A16")],
)
def test_a_loss_is_that_of_a_checkpoint_with_only_this_group(
    name: str, scheme: str, measured: GroupSensitivities, tmp_path: Path
) -> None:
    model = DEMO / "model-x16"
    (unit,) = (one for one in units_of(read_index(model), "NVFP4", "W4A16") if one.name == name)
    rules = (*unit.rules(scheme), Rule(match="Linear", scheme=KEEP))
    settings = Calibration(data=DEMO / "calibration.jsonl", samples=SAMPLES, seq_len=64)
    quantize_source(QuantizeJob(source=str(model), out=tmp_path / "one", rules=rules, calibration=settings))
    # The reference leaves out what follows the last token of a prompt.
    prompts = [(*ids, 0) for ids in samples(model).token_ids]
    plain, quantized = reference_logprobs(model, prompts), reference_logprobs(tmp_path / "one", prompts)
    loss = float((plain.exp() * (plain - quantized)).sum(-1).mean())
    assert torch.isfinite(quantized).all()
    assert losses(measured)[name, scheme].loss == pytest.approx(loss, rel=TOLERANCE)


def test_a_second_call_runs_nothing_again(tmp_path: Path) -> None:
    steps: list[str] = []
    file = tmp_path / "trials.json"
    first = run(DEMO / "model", file, "W4A16", steps=steps)
    ran = len(steps)
    assert ran == 3
    assert run(DEMO / "model", file, "W4A16", steps=steps) == first
    assert len(steps) == ran
    assert run(DEMO / "model", file, "W4A16", "FP8_DYNAMIC", steps=steps) != first
    assert len(steps) > ran


@pytest.mark.usefixtures("own_products")
@pytest.mark.parametrize("rounding", ["gptq", "refit"])
def test_a_loss_is_that_of_the_rounding_that_is_written(rounding: Rounding, tmp_path: Path) -> None:
    """With nothing quantized in front of it a refit of weights alone is GPTQ. Losses that another rounding
    has left in the file are not taken."""
    model, projection = DEMO / "model-x16", r"re:model\.layers\.0\.mlp\.down_proj"
    index, kept = read_index(model), Rule(match="Linear", scheme=KEEP)
    auto = (Rule(match=projection, scheme="auto", rounding=rounding), kept)
    (unit,) = units_of(index, "W4A16", rules=auto)
    settings = Calibration(data=DEMO / "calibration.jsonl", samples=SAMPLES, seq_len=64)
    rows, found = samples(model), {}
    for asked in (auto, (Rule(match=projection, scheme="auto", rounding="nearest"), kept)):
        units = units_of(index, "W4A16", rules=asked)
        sensitivity = measure(
            index,
            units,
            calibrate(
                LayerWalk(index), probe_plan(build_plan(index, rules_with((), {}, asked)), units), rows
            ),
            rows,
            file=tmp_path / "trials.json",
            on_progress=lambda stage, done, total: None,
            trust_remote_code=False,
            device="cpu",
        )
        found[asked[0].rounding] = losses(sensitivity)[unit.name, "W4A16"].loss
    rules = (*(rule.model_copy(update={"rounding": "gptq"}) for rule in unit.rules("W4A16")), kept)
    quantize_source(QuantizeJob(source=str(model), out=tmp_path / "one", rules=rules, calibration=settings))
    prompts = [(*ids, 0) for ids in rows.token_ids]
    plain, quantized = reference_logprobs(model, prompts), reference_logprobs(tmp_path / "one", prompts)
    loss = float((plain.exp() * (plain - quantized)).sum(-1).mean())
    assert found[rounding] == pytest.approx(loss, rel=TOLERANCE)
    assert found["nearest"] != pytest.approx(loss, rel=TOLERANCE)


def test_torch_computes_with_the_threads_of_numba() -> None:
    """From the start, not from the first kernel on: sums depend on the number."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(numba.get_num_threads() + 2)
        build_on_meta(DEMO / "model", trust_remote_code=False)
        assert torch.get_num_threads() == numba.get_num_threads()
    finally:
        torch.set_num_threads(before)
