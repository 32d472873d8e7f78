"""Smoothing changes weights, but not the model's output. `check` accepts smoothed weights."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from tests.calibration.models import configs, expert_configs, plan_for, samples, save
from tests.command import vexport
from tests.models import quantize, save_llama, write_calibration
from tests.mutations.edits import multiply_by, put, spoiled
from vexport.calibration.smoothing import find_smoothing
from vexport.calibration.walk import LayerWalk
from vexport.checkpoint.index import SourceIndex, read_index
from vexport.checkpoint.reader import Reader
from vexport.checkpoint.smoothed import SMOOTHING, encode, reader_of, write_smoothing
from vexport.checkpoint.tensors import read_tensor
from vexport.records import Smoothing

TEXT = samples((16,) * 4)
FAMILIES = {**configs(), **expert_configs()}
# Last parts of the names of layers whose inputs are smoothed: layers after a norm, and the last
# layer of an MLP. Not smoothed are inputs after norms that multiply by 1 + weight (Gemma,
# Qwen3-Next), inputs of experts, and GPT-2, which stores weights as (in, out).
SMOOTHED = {
    "llama": {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"},
    "gemma3": {"down_proj"},
    "phi3": {"qkv_proj", "gate_up_proj"},
    "gpt_neox": {"query_key_value", "dense_h_to_4h"},
    "gpt2": set[str](),
    "opt": {"q_proj", "k_proj", "v_proj", "fc1", "fc2", "out_proj"},
    "bloom": {"query_key_value", "dense_h_to_4h"},
    "mixtral": {"q_proj", "k_proj", "v_proj"},
    "qwen3_moe": {"q_proj", "k_proj", "v_proj"},
}


def with_large_channels(folder: Path) -> Path:
    """Multiply some channels after each norm by about twenty."""
    tensors = load_file(folder / "model.safetensors")
    for name, value in tensors.items():
        if value.dim() == 1 and name.endswith(("norm.weight", "ln_1.weight", "ln_2.weight")):
            value[::16] += 19
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        return torch.cat([model(input_ids=torch.tensor([ids])).logits for ids in TEXT.token_ids])


def smoothing_of(folder: Path) -> tuple[SourceIndex, Mapping[str, Smoothing]]:
    index, planned = plan_for(folder, scheme="W8A8")
    found, weights = find_smoothing(
        LayerWalk(index), TEXT, smoothed=planned.groups, strength=0.5, weighs_tokens=False
    )
    assert not weights
    return index, found


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("qwen3", "mistral")])
def test_smoothing_keeps_output_bits(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = with_large_channels(save(FAMILIES[family], tmp_path / family))
    with caplog.at_level("DEBUG", "vexport.calibration.gradients"):
        index, smoothing = smoothing_of(folder)
    assert not [
        record for record in caplog.records if record.name == "vexport.calibration.gradients"
    ]
    with reader_of(smoothing) as reader:
        tensors = {
            name: read_tensor(reader, tensor).clone() for name, tensor in index.tensors.items()
        }
    before = load_file(folder / "model.safetensors")
    changed = {name for name, value in tensors.items() if not torch.equal(value, before[name])}
    assert changed == smoothing.keys()
    readers = {name.split(".")[-2] for name, exponents in smoothing.items() if exponents.columns}
    assert readers == SMOOTHED.get(family, readers)
    expected = logits(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits(folder), expected)


def test_without_gradients_weights_decide_smoothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(FAMILIES["llama"], tmp_path / "llama")
    (_, by_gradients), forward = smoothing_of(folder), LlamaMLP.forward

    def refusing(self: LlamaMLP, value: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            raise NotImplementedError("no gradient of this operation")
        made: torch.Tensor = forward(self, value)
        return made

    monkeypatch.setattr(LlamaMLP, "forward", refusing)
    _, by_weights = smoothing_of(folder)
    assert by_weights.keys() == by_gradients.keys()
    assert by_weights != by_gradients


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_exponents_of_rows_and_columns(tmp_path: Path, dtype: torch.dtype) -> None:
    weight = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows, columns = np.array([-2, 0, 1, 3, -4], np.int8), np.arange(-3, 4, dtype=np.int8)
    save_llama(tmp_path)
    save_file({"a": weight, "n": weight[0].clone()}, tmp_path / "model.safetensors")
    index = read_index(tmp_path)
    smoothing = {
        "a": Smoothing(rows=encode(rows), columns=encode(columns)),
        "n": Smoothing(rows=encode(columns)),
    }
    expected = weight.float() * 2.0 ** (torch.tensor(rows)[:, None] + torch.tensor(columns))
    with reader_of(smoothing) as reader, Reader() as plain:
        assert torch.equal(read_tensor(reader, index.tensors["a"]), expected.to(dtype))
        of_norm = weight[0].float() * 2.0 ** torch.tensor(columns)
        assert torch.equal(read_tensor(reader, index.tensors["n"]), of_norm.to(dtype))
        assert torch.equal(read_tensor(plain, index.tensors["a"]), weight)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_large_channels(save_llama(tmp_path_factory.mktemp("smoothing") / "llama"))


@pytest.fixture(scope="module")
def text(source: Path) -> Path:
    return write_calibration(source.with_name("text.jsonl"), rows=8)


@pytest.fixture(scope="module")
def smoothed(source: Path, text: Path) -> Path:
    """Quantize with the default strength of smoothing."""
    out = source.with_name("W8A8")
    assert vexport("quantize", source, out, "--scheme", "W8A8", "--calibration", text).code == 0
    return out


def test_check_accepts_smoothed_weights(
    source: Path, text: Path, smoothed: Path, tmp_path: Path
) -> None:
    assert (smoothed / SMOOTHING).is_file()
    plain = quantize(source, tmp_path / "plain", "W8A8", "--calibration", text)
    assert not (plain / SMOOTHING).exists()
    ran = vexport("check", smoothed, "--source", source, "--format", "json")
    (report,) = json.loads(ran.stdout)
    assert ran.code == 0
    assert not [finding for finding in report["findings"] if finding["severity"] == "error"]
    norm = "model.layers.1.input_layernorm.weight"
    ran = vexport(
        "check",
        spoiled(smoothed, tmp_path / "spoiled", put(norm, multiply_by(2))),
        "--source",
        source,
    )
    assert ran.code == 1
    assert norm in ran.stdout


NORM = "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f'{{"tensors": {{"{NORM}": {{"rows": "AAAA"}}}}}}', "[256]"),
        (
            json.dumps({"tensors": {f"a.{number}": {} for number in range(1000)}}),
            "(and 999 more tensors)",
        ),
        (None, "a pipe or a device"),
    ],
)
def test_unusable_exponents_are_errors(
    source: Path, smoothed: Path, tmp_path: Path, content: str | None, message: str
) -> None:
    checkpoint = copytree(smoothed, tmp_path / "checkpoint")
    if content is None:
        (checkpoint / SMOOTHING).unlink()
        os.mkfifo(checkpoint / SMOOTHING)
    else:
        (checkpoint / SMOOTHING).write_text(content, encoding="utf-8")
    ran = vexport("check", checkpoint, "--source", source)
    assert ran.code == 1
    assert message in " ".join(ran.stdout.split())  # lines break by the length of paths
    assert SMOOTHING in ran.stdout


FORGED = {
    "readers of another norm": ("input_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    "one reader left out": ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj")),
    "layers that do not follow each other": ("self_attn.q_proj", ("self_attn.o_proj",)),
}


@pytest.mark.parametrize("how", FORGED)
def test_forged_exponents_are_errors(source: Path, tmp_path: Path, how: str) -> None:
    """All weights match the file's exponents, but the exponents do not cancel in the model."""
    rows, readers = FORGED[how]
    layer, index = "model.layers.1.", read_index(source)
    size = index.tensors[f"{layer}{rows}.weight"].shape[0]
    exponents = np.resize(np.array([3, 0, -2, 1], np.int8), size)
    names = tuple(f"{layer}{name}.weight" for name in readers)
    forged = {f"{layer}{rows}.weight": Smoothing(rows=encode(exponents), readers=names)}
    forged |= {name: Smoothing(columns=encode(-exponents)) for name in names}
    model = copytree(source, tmp_path / "model")
    with reader_of(forged) as reader:
        tensors = {
            name: read_tensor(reader, tensor).clone() for name, tensor in index.tensors.items()
        }
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    out = quantize(model, tmp_path / "out", "W8A16")
    write_smoothing(forged, out)
    ran = vexport("check", out, "--source", source)
    assert ran.code == 1
    assert "1 error at" in ran.errors[0]
    assert "smoothing.json: model.layers.1" in ran.errors[0]


def with_code(folder: Path, copy: Path, mark: Path, model_type: str) -> Path:
    """Copy a checkpoint and add Python for its config, model and tokenizer that writes `mark`."""
    copytree(folder, copy)
    (copy / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast\n"
        f"open({str(mark)!r}, 'w').close()\n"
        f"class OwnConfig(LlamaConfig): model_type = {model_type!r}\n"
        "class OwnModel(LlamaForCausalLM): config_class = OwnConfig\n"
        "class OwnTokenizer(PreTrainedTokenizerFast): pass\n"
    )
    code = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    config = json.loads((copy / "config.json").read_text())
    changes = {"model_type": model_type, "auto_map": code}
    (copy / "config.json").write_text(json.dumps({**config, **changes}))
    tokenizer = {
        "tokenizer_class": "Own",
        "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]},
    }
    (copy / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return copy


@pytest.mark.parametrize("model_type", ["llama", "own-llama"])
def test_check_with_source_runs_no_code(
    source: Path, smoothed: Path, tmp_path: Path, model_type: str
) -> None:
    """The checkpoint is smoothed, so that the check computes layers of the source."""
    mark = tmp_path / "ran"
    origin = with_code(source, tmp_path / "source", mark, model_type)
    checkpoint = with_code(smoothed, tmp_path / "checkpoint", mark, model_type)
    for options in ((), ("--static",), ("--static", "--trust-remote-code")):
        ran = vexport("check", checkpoint, "--source", origin, *options)
        assert ran.code in (0, 1), ran.stderr
        assert ("the source cannot run" in ran.stdout) == (model_type == "own-llama")
        assert not mark.exists(), options
    AutoConfig.from_pretrained(origin, trust_remote_code=True)
    assert mark.exists()  # the code writes the file if it may run


def test_repair_of_smoothed_checkpoint(source: Path, smoothed: Path, tmp_path: Path) -> None:
    ran = vexport("repair", smoothed, tmp_path / "out", "--source", source)
    assert ran.code == 0, ran.stderr
    assert f"compared with {source}" in ran.stdout
    assert (tmp_path / "out" / SMOOTHING).read_bytes() == (smoothed / SMOOTHING).read_bytes()
    assert vexport("repair", smoothed, tmp_path / "again").code == 0


def test_recipe_with_smoothquant(source: Path, text: Path, smoothed: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "quant_stage:\n  quant_modifiers:\n    SmoothQuantModifier: {smoothing_strength: 0.5}\n"
        "    QuantizationModifier: {scheme: W8A8, targets: [Linear], ignore: [lm_head]}\n",
        encoding="utf-8",
    )
    ran = vexport("quantize", source, tmp_path / "out", "--recipe", recipe, "--calibration", text)
    assert ran.code == 0, ran.stderr
    assert "smoothed" in ran.stdout
    assert (tmp_path / "out" / SMOOTHING).read_bytes() == (smoothed / SMOOTHING).read_bytes()
    recipe.write_text(recipe.read_text().replace("0.5", "2"), encoding="utf-8")
    ran = vexport("quantize", source, tmp_path / "other", "--recipe", recipe, "--calibration", text)
    assert ran.code == 2
    assert "smoothing_strength" in ran.stderr
