"""Micro models with random weights, saved as real checkpoints, and common operations on them."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.command import vexport
from vexport.checks import check_checkpoint
from vexport.records import Finding

VOCABULARY = 384
# Type of the fixture `good`: a function that quantizes the micro Llama in the scheme with the given
# name, and returns the folder.
Good = Callable[[str], Path]
SIZES: Mapping[str, int] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
}


def save_llama(folder: Path, **changes: object) -> Path:
    """Save a Llama with weights from a fixed seed. `changes` apply to its config."""
    return _save(folder, LlamaForCausalLM, LlamaConfig(**{**SIZES, "dtype": "bfloat16", **changes}))


def save_qwen3(folder: Path, **changes: object) -> Path:
    """Save a Qwen3 with tied embeddings, and norms of queries and keys."""
    config = Qwen3Config(**{**SIZES, "dtype": "bfloat16", "tie_word_embeddings": True, **changes})
    return _save(folder, Qwen3ForCausalLM, config)


def save_qwen3_moe(folder: Path, **changes: object) -> Path:
    """Save a Qwen3 with four experts in each layer."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    config = Qwen3MoeConfig(**{**SIZES, **experts, "dtype": "bfloat16", **changes})
    return _save(folder, Qwen3MoeForCausalLM, config)


def _save(folder: Path, kind: type[PreTrainedModel], config: PreTrainedConfig) -> Path:
    with torch.device("meta"):
        model = kind(config)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, parameter in model.named_parameters():
        if "norm" in name:
            value = torch.ones(parameter.shape)
        else:
            value = torch.randn(parameter.shape, generator=generator) * 0.05
        tensors[name] = value.to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures = [kind.__name__]
    config.save_pretrained(folder)
    return folder


WORDS = tuple(f"w{number}" for number in range(4, VOCABULARY))


def write_tokenizer(folder: Path, words: Iterable[str] = WORDS) -> None:
    """Write a tokenizer with special tokens and whole words.

    By default its words cannot encode English text.
    """
    vocabulary = {
        word: number for number, word in enumerate(("<pad>", "<s>", "</s>", "<unk>", *words))
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    )
    fast.save_pretrained(folder)


def write_calibration(
    path: Path, rows: int = 8, length: int = 32, vocabulary: int = VOCABULARY
) -> Path:
    """Write rows of random token ids."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, vocabulary, (rows, length), generator=generator).tolist()
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ids), encoding="utf-8")
    return path


def quantize(source: Path, out: Path, scheme: str, *options: object) -> Path:
    """Quantize a checkpoint to `out`, which must succeed.

    The defaults are rounding to nearest and no smoothing. Tests that need a dry load start it.
    """
    plain = {"--rounding": "nearest", "--smoothing": "0"}
    added = [word for name, value in plain.items() if name not in options for word in (name, value)]
    ran = vexport(
        "quantize", source, out, "--scheme", scheme, *added, *options, "--no-verify", "--quiet"
    )
    assert ran.code == 0, ran.stderr
    return out


def save_w4a8_in_bytes(source: Path, out: Path) -> Path:
    """Quantize to W4A8 as llm-compressor stores it: int-quantized, with one code per byte."""
    quantize(source, out, "W4A8")
    (out / "vexport.json").unlink()
    weights = out / "model.safetensors"
    tensors = load_file(weights)
    for packed in [name for name in tensors if name.endswith(".weight_packed")]:
        weight = packed.removesuffix("_packed")
        shape = torch.Size(tensors.pop(f"{weight}_shape").tolist())
        tensors[weight] = unpack_from_int32(tensors.pop(packed), 4, shape)
    save_file(tensors, weights, metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    settings = config["quantization_config"]
    for part in (settings, *settings["config_groups"].values()):
        part["format"] = "int-quantized"
    (out / "config.json").write_text(json.dumps(config))
    return out


def dequantized(folder: Path, layer: str) -> torch.Tensor:
    """Return a layer's weight (out, in), dequantized by compressed-tensors.

    The checkpoint must have only one config group.
    """
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    (raw,) = config["config_groups"].values()
    keys = ("targets", "weights", "input_activations")
    scheme = QuantizationScheme.model_validate({key: raw[key] for key in keys})
    tensors = load_file(folder / "model.safetensors")
    start = f"{layer}."
    stored = {
        name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)
    }
    weight: torch.Tensor = BaseCompressor.get_value_from_registry(raw["format"]).decompress(
        stored, scheme
    )["weight"]
    return weight


def problems(folder: Path) -> list[Finding]:
    """Return all findings on a checkpoint, except that micro models have no tokenizer."""
    found = check_checkpoint(str(folder)).findings
    return [each for each in found if each.rule != "tokenizer/no-tokenizer"]


def errors(folder: Path) -> list[Finding]:
    """Return the errors of a checkpoint."""
    report = check_checkpoint(str(folder))
    found = [finding for finding in report.findings if finding.severity == "error"]
    assert report.ok is (not found)
    return found
