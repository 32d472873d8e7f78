"""A tiny random Llama with a word-level tokenizer, quantized by compressed-tensors' own code.

Independent of vexport's quantizer: presets, ranges, scales and packing all come from compressed-tensors.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.models import SIZES, VOCABULARY

LAYERS = 2
# Layers that vLLM runs as one parameter, and that share global scales for it.
FUSED = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
PARENT = {"q": "self_attn", "k": "self_attn", "v": "self_attn", "o": "self_attn"}


def write_model(folder: Path, seed: int = 0) -> Path:
    """An unquantized checkpoint whose next-token distributions are neither flat nor one-hot."""
    sizes = {**SIZES, "num_hidden_layers": LAYERS, "max_position_embeddings": 512}
    config = LlamaConfig(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.06)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path, vocabulary: int = VOCABULARY) -> None:
    """Whole words `w4` to the last of the vocabulary, so that no English text can be encoded."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    words |= {f"w{number}": number for number in range(4, vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)


def quantize_model(source: Path, folder: Path, preset: str, *, share_scales: bool = True) -> Path:
    """Quantize every linear layer but lm_head; inputs are calibrated to a range that RMSNorm produces."""
    folder.mkdir(parents=True, exist_ok=True)
    scheme = preset_name_to_scheme(preset, ["Linear"])
    scheme.format = infer_module_format(torch.nn.Linear, scheme)
    compressor = BaseCompressor.get_value_from_registry(scheme.format.value)
    tensors = load_file(source / "model.safetensors")
    for names in _fused_names():
        weights = {name: tensors.pop(f"{name}.weight").to(torch.float32) for name in names}
        shared = tuple(weights.values())
        for name, weight in weights.items():
            alone = shared if share_scales else (weight,)
            state = {"weight": weight, **_weight_scales(weight, alone, scheme.weights)}
            state |= _input_scales(scheme.input_activations)
            for key, tensor in compressor.compress(state, scheme).items():
                tensors[f"{name}.{key}"] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization_config(scheme, ["lm_head"])
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


def quantization_config(scheme: QuantizationScheme, ignore: Sequence[str]) -> dict[str, object]:
    return {
        "quant_method": "compressed-tensors",
        "format": infer_module_format(torch.nn.Linear, scheme).value,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme.model_dump(mode="json", exclude={"format"})},
        "ignore": ignore,
    }


def _fused_names() -> Iterable[list[str]]:
    for layer in range(LAYERS):
        for group in FUSED:
            yield [f"model.layers.{layer}.{PARENT.get(n.split('_')[0], 'mlp')}.{n}" for n in group]


def _weight_scales(
    weight: torch.Tensor, shared: tuple[torch.Tensor, ...], args: QuantizationArgs
) -> dict[str, torch.Tensor]:
    """Scale and zero point of a weight (out, in) from its own ranges, or the group's for one a tensor."""
    everything = torch.cat(shared)
    if args.strategy == "tensor":
        scale, zero = calculate_qparams(everything.min(), everything.max(), args)
        return {"weight_scale": scale, "weight_zero_point": zero}
    size = args.group_size or weight.shape[1]
    blocks = weight.reshape(weight.shape[0], -1, size)
    found = {}
    if args.strategy == "tensor_group":
        found["weight_global_scale"] = generate_gparam(everything.min(), everything.max())
    scale, zero = calculate_qparams(
        blocks.amin(-1), blocks.amax(-1), args, global_scale=found.get("weight_global_scale")
    )
    if args.type == "int":
        scale = scale.to(torch.bfloat16)
    return {**found, "weight_scale": scale, "weight_zero_point": zero}


def _input_scales(args: QuantizationArgs | None) -> dict[str, torch.Tensor]:
    limit = torch.tensor(8.0)
    if args is None or args.dynamic is True:
        return {}
    if args.dynamic == "local":
        return {"input_global_scale": generate_gparam(-limit, limit)}
    scale, _ = calculate_qparams(-limit, limit, args)
    return {"input_scale": scale}
