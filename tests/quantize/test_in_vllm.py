"""The real vLLM on refitted weights of all schemes, compared with the dequantized weights."""

from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.models import save_llama, write_calibration, write_tokenizer
from vexport.api import load
from vexport.formats.schemes import scheme_names
from vexport.names import Folder
from vexport.quantize.job import QuantizeJob, quantize_source
from vexport.records import LoadReport
from vexport.records.calibration import Rounding
from vexport.scenario import Calibration, Rule

# Fused layers have one scheme, so that a decoder layer can have four schemes.
PARTS = (
    "self_attn[.](q|k|v)_proj",
    "self_attn[.]o_proj",
    "mlp[.](gate|up)_proj",
    "mlp[.]down_proj",
)
SCHEMES = scheme_names()
LAYERS = -(-len(SCHEMES) // len(PARTS))
USED_PARTS = (PARTS * LAYERS)[: len(SCHEMES)]


def quantize(source: Path, rounding: Rounding) -> Path:
    """Quantize each scheme in a separate layer, and keep all other layers."""
    places = [f"re:.*layers[.]{number}[.]{part}" for number, part in product(range(LAYERS), PARTS)]
    rules = [
        Rule(match=place, scheme=scheme, observer="memoryless_minmax", rounding=rounding)
        for place, scheme in zip(places, SCHEMES, strict=False)
    ]
    out, data = source.with_name(rounding), write_calibration(source.with_name("text.jsonl"))
    settings = Calibration(data=data)
    rules.append(Rule(match="Linear", scheme="keep"))
    quantize_source(
        QuantizeJob(source=Folder.at(source), out=out, rules=tuple(rules), calibration=settings)
    )
    return out


@pytest.mark.vllm
@pytest.mark.slow
def test_all_schemes_in_one_model(tmp_path: Path) -> None:
    source = save_llama(
        tmp_path / "llama", num_hidden_layers=LAYERS, bos_token_id=1, eos_token_id=2
    )
    write_tokenizer(source)
    nearest = load_file(quantize(source, "nearest") / "model.safetensors")
    refit = load_file(quantize(source, "refit") / "model.safetensors")
    layers = [name.removesuffix("_scale") for name in nearest if name.endswith(".weight_scale")]
    stored = [name if name in nearest else f"{name}_packed" for name in layers]
    assert len(stored) == sum(
        3 if "q|k|v" in part else 2 if "gate" in part else 1 for part in USED_PARTS
    )
    assert [name for name in stored if torch.equal(nearest[name], refit[name])] == []
    report = load(tmp_path / "refit")
    assert isinstance(report, LoadReport)
    assert report.ok, report.findings
    assert report.logprobs is not None
    assert report.engine is not None
    # The limit follows the inputs' precision: inputs of 4 bits round to other codes if the order of
    # a sum differs.
    assert 0 < report.logprobs.mean_kl < report.logprobs.limit
    assert report.logprobs.positions >= 100
    assert not report.engine.multiprocess, "one import of vLLM is enough"
    assert report.engine.emulated
    assert report.engine.blind_spots
    classes = {kernel.partition("(")[2] for kernel in report.engine.kernels} - {""}
    assert len(classes) == 9, classes
