"""Several schemes in one checkpoint: vLLM finds each layer's own, also where it takes no name apart."""

from pathlib import Path

import pytest

from tests.architectures.families import save_family
from vexport.engine.dry.load import DryLoad
from vexport.quantize.job import QuantizeJob, quantize_source
from vexport.scenario import Rule

# Family -> layers in vLLM, and the scheme with which it builds them by the rules below.
BUILT = {
    "qwen2-moe": {
        "model.layers.*.self_attn.qkv_proj": "W8A8Fp8",
        "model.layers.*.mlp.shared_expert.gate_up_proj": "W8A8Int8",
        "model.layers.*.mlp.shared_expert.down_proj": "W8A8Int8",
        "model.layers.*.mlp.experts.routed_experts": "WNA16",
    },
    "qwen3.5-moe": {
        "language_model.model.layers.*.linear_attn.in_proj_qkvz": "W8A8Fp8",
        "language_model.model.layers.*.mlp.shared_expert.gate_up_proj": "W8A8Int8",
        "language_model.model.layers.*.mlp.experts.routed_experts": "WNA16",
    },
}
RULES = (
    Rule(match="re:.*shared_expert[.].*", scheme="W8A8"),
    Rule(match="re:.*experts[.].*", scheme="W4A16"),
    Rule(match="Linear", scheme="FP8_DYNAMIC"),
)


@pytest.mark.vllm
def test_vllm_finds_the_scheme_of_every_layer(tmp_path: Path) -> None:
    """Qwen2-MoE's class does not say what gate_up_proj is made of: it is a target under its own name."""
    for family in BUILT:
        source = str(save_family(family, tmp_path / family))
        quantize_source(QuantizeJob(source=source, out=tmp_path / f"{family}-out", rules=RULES))
    for report in DryLoad(checkpoints=[tmp_path / f"{family}-out" for family in BUILT], sm=(90,)).reports():
        family = Path(report.checkpoint).name.removesuffix("-out")
        assert [cell.status for cell in report.cells] == ["loads"], report.findings
        built = {row.name: row.scheme for row in report.rows}
        assert {name: built.get(name) for name in BUILT[family]} == BUILT[family]
