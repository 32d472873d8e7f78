"""A model with code of its own is rounded in a run, once that is allowed."""

import json
from pathlib import Path

from tests.models import save_llama, write_calibration
from vexport.run.making import plan, write
from vexport.run.serving import EngineOptions
from vexport.run.state import PLAN, Run
from vexport.scenario import read_scenario
from vexport.types import silent

CODE = """from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own-llama"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_weights_of_a_model_with_its_own_code_are_rounded(tmp_path: Path) -> None:
    source = save_llama(tmp_path / "source", num_hidden_layers=1)
    (source / "own.py").write_text(CODE)
    config = json.loads((source / "config.json").read_text())
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (source / "config.json").write_text(json.dumps({**config, "model_type": "own-llama", "auto_map": own}))
    data = write_calibration(tmp_path / "text.jsonl")
    rule = {"match": "Linear", "scheme": "W4A16_G64", "rounding": "gptq"}
    text = {"name": "own", "source": str(source), "rules": [{"match": "lm_head", "scheme": "keep"}, rule]}
    scenario = tmp_path / "own.yaml"
    scenario.write_text(json.dumps({**text, "calibration": {"data": str(data), "samples": 4}}))
    read = read_scenario(scenario)
    options = EngineOptions(serve=read.serve, vllm_python=None, trust_remote_code=True, on_progress=silent)
    run = Run(read, tmp_path / "run", options)
    run.folder.mkdir()
    run.keep(PLAN, plan(run))
    assert "model.layers.0.mlp.down_proj.weight_packed" in write(run).tensors
