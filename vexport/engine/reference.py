"""Compute a checkpoint's expected log-probabilities with transformers.

The reference uses neither vLLM nor vexport's quantizer. compressed-tensors dequantizes the weights.
The inputs of each layer are rounded as the layer's scheme requires, in float32, with scales from
compressed-tensors. Inputs of routed experts are not rounded, because transformers runs all experts
of a layer in one module.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
import transformers
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.transform import TransformArgs, TransformConfig
from compressed_tensors.transform.utils.matrix import apply_transform_weight
from compressed_tensors.utils.match import is_match, match_name
from safetensors.torch import load_file, save_file
from torch.nn import Linear, Module
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from vexport.bus_errors import watch_for_cuts
from vexport.checkpoint.index import StoredQuantization, find_quantization
from vexport.checks.vllm.groups import INPUT, OUTPUT
from vexport.engine.agreement import KL_LIMITS
from vexport.errors import InputError, first_line
from vexport.files import atomic_path
from vexport.formats import nearest_format
from vexport.formats.base import EXPERT
from vexport.formats.config import K_SCALE, Q_SCALE, V_SCALE
from vexport.formats.dequantize import arguments_of, ignore_group_warning
from vexport.formats.input_rounding import InputRounding
from vexport.numerics.metrics import kl_divergence
from vexport.outputs.manifest import record
from vexport.records import Canary, OnProgress, silent
from vexport.rules import engine as rules

Tensors = dict[str, torch.Tensor]
REFERENCE_FILE = "reference.safetensors"
"""File of the reference, next to vLLM's log-probabilities."""
_MATRIX, _NOISE = "logprobs", "noise"
# Standard deviation of the noise that imitates the rounding error of bfloat16 (at most 2**-8).
# NOISE_FACTOR is the largest allowed ratio of vLLM's difference to the effect of this noise.
BFLOAT16_ROUNDING = 2**-9
NOISE_FACTOR = 3.0
KV_SCALES = (f".{K_SCALE}", f".{V_SCALE}", f".{Q_SCALE}")


def reference_logprobs(
    checkpoint: Path,
    prompts: Sequence[Sequence[int]],
    *,
    jitter: float = 0.0,
    on_progress: OnProgress = silent,
) -> torch.Tensor:
    """Return log-probabilities of the next token after each token of each prompt.

    A prompt's last token is skipped, because no token follows it.

    The result is float32 (sum of len(prompt) - 1, vocabulary), with the prompts in their order. The
    model computes in the checkpoint's dtype, but in bfloat16 if that is float32. With `jitter`, the
    embeddings are multiplied by 1 + jitter times normal noise, which is the same at every call.

    Raises InputError if transformers does not know the model or finds no tensor for one of its
    weights, if the quantization method is not compressed-tensors, or if the checkpoint has
    transforms of attention.
    """
    rows: list[torch.Tensor] = []
    stage = "reference with noise" if jitter else "reference"
    on_progress(stage, 0, len(prompts))
    model = load_dequantized(checkpoint)
    if jitter:
        _jitter_embeddings(model, jitter)
    # compressed-tensors compiles its FP4 rounding, which needs a C++ compiler.
    with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
        for prompt in prompts:
            logits: torch.Tensor = model(torch.tensor([list(prompt)])).logits[0, :-1]
            rows.append(torch.log_softmax(logits.to(torch.float32), dim=-1))
            on_progress(stage, len(rows), len(prompts))
    return torch.cat(rows)


def agreement_limit(
    checkpoint: Path,
    prompts: Sequence[Sequence[int]],
    path: Path,
    *,
    mean_kl: float,
    limit: float,
    on_progress: OnProgress = silent,
) -> float:
    """Return the limit on the mean KL(reference || vLLM) for this checkpoint.

    Return `limit` if `mean_kl` does not exceed it, or if `limit` is the limit without rounded
    inputs. Otherwise, the result also depends on the mean KL that noise on the embeddings causes in
    the reference. If a checkpoint rounds its inputs, a difference in the last bit of bfloat16 can
    become a whole quantization step in every layer. Such a difference in the embeddings of
    SmolLM2-135M alone causes a mean KL of 0.040 in W8A8, 0.021 in FP8_DYNAMIC and 0.24 in NVFP4.
    The mean KL between vLLM and the reference is 0.057 in W8A8 and 0.033 in FP8_DYNAMIC. The mean
    KL of the noise is stored in `path`, the file of `cached_reference`.
    """
    if mean_kl <= limit or limit <= KL_LIMITS[16]:
        return limit
    tensors = load_file(path)
    if _NOISE not in tensors:
        jittered = reference_logprobs(
            checkpoint, prompts, jitter=BFLOAT16_ROUNDING, on_progress=on_progress
        )
        tensors[_NOISE] = kl_divergence(tensors[_MATRIX], jittered).mean()
        with atomic_path(path) as temporary:
            save_file(tensors, temporary)
    return max(limit, NOISE_FACTOR * float(tensors[_NOISE]))


def _jitter_embeddings(model: Module, jitter: float) -> None:
    assert isinstance(model, PreTrainedModel)
    embeddings = model.get_input_embeddings()
    generator = torch.Generator().manual_seed(0)

    def jittered(_: Module, __: object, output: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(output.shape, generator=generator)
        return (output * (1 + jitter * noise)).to(output.dtype)

    embeddings.register_forward_hook(jittered)


def cached_reference(
    checkpoint: Path, prompts: Sequence[Sequence[int]], path: Path, on_progress: OnProgress = silent
) -> torch.Tensor:
    """Return the result of `reference_logprobs`, cached in the safetensors file `path`.

    If the file does not exist, the log-probabilities are computed and written to it.
    """
    if not path.is_file():
        record(path)
        with atomic_path(path) as temporary:
            save_file(
                {_MATRIX: reference_logprobs(checkpoint, prompts, on_progress=on_progress)},
                temporary,
            )
    matrix: torch.Tensor = load_file(path)[_MATRIX]
    return matrix


def reference_canaries(checkpoint: Path, canaries: Sequence[Canary]) -> tuple[Canary, ...]:
    """Return the reference's greedy continuations of the canaries' prompts.

    A continuation has the number of tokens of its canary, or fewer if the reference model ends the
    text. Raises the errors of `reference_logprobs`.
    """
    model = load_dequantized(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return tuple(_continuation(model, tokenizer, canary) for canary in canaries)


def _continuation(model: Module, tokenizer: PreTrainedTokenizerBase, canary: Canary) -> Canary:
    prompt = tokenizer(canary.prompt, return_tensors="pt")["input_ids"]
    assert isinstance(model, GenerationMixin)
    with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
        tokens = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=canary.tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id or 0,
        )[0, prompt.shape[1] :]
    ended = len(tokens) < canary.tokens
    return Canary(
        prompt=canary.prompt,
        text=str(tokenizer.decode(tokens, skip_special_tokens=True)),
        tokens=len(tokens),
        finish_reason="stop" if ended else "length",
        ended_after=len(tokens) - 1 if ended else None,
    )


def load_dequantized(checkpoint: Path) -> Module:
    """Return the checkpoint as a transformers model that rounds activations as in its schemes."""
    raw = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    try:
        config, dtype, skeleton = _without_weights(checkpoint)
    except ValueError as error:  # vLLM has some models that transformers does not know
        raise InputError.of(rules.REFERENCE, str(checkpoint), found=first_line(error)) from error
    logging.disable_progress_bar()
    tensors = _read_tensors(checkpoint)
    stored = {key.rpartition(".")[0] for key in tensors}
    linear = Linear(1, 1, device="meta")
    modules = _modules_of(skeleton, stored)
    linears = {
        name: linear
        for name, module in modules.items()
        if isinstance(skeleton.get_submodule(module), Linear | Conv1D)
    }
    # Projections of single experts. transformers joins the experts of a layer in one tensor once it
    # has read all of them.
    experts = {key.rpartition(".")[0]: linear for key in tensors if EXPERT.search(key)}
    quantization = find_quantization(checkpoint, raw)
    transforms = _take_transforms(quantization, tensors)
    schemes = schemes_of_layers({**linears, **experts}, quantization, tensors)
    inputs = {name: _dequantize(name, scheme, tensors, dtype) for name, scheme in schemes.items()}
    for name in schemes:
        if name not in experts and isinstance(skeleton.get_submodule(modules[name]), Conv1D):
            tensors[f"{name}.weight"] = tensors[f"{name}.weight"].T.contiguous()
    loaded: tuple[Module, dict[str, Iterable[str]]] = type(skeleton).from_pretrained(
        None, config=config, state_dict=tensors, dtype=dtype, output_loading_info=True
    )
    model, loading = loaded
    if missing := sorted(loading["missing_keys"]):  # transformers would initialize them randomly
        where = f"{checkpoint}: {missing[0]}"
        raise InputError.of(rules.REFERENCE, where, found="no weight under this name")
    for transform in transforms:  # before any other hook on inputs
        transform.attach(model)
    for name, scales in inputs.items():
        rounding = schemes[name].input_activations
        if rounding is not None and name not in experts:
            model.get_submodule(modules[name]).register_forward_pre_hook(
                InputRounding(rounding, scales).hook
            )
    return model.eval()


def _without_weights(checkpoint: Path) -> tuple[PreTrainedConfig, torch.dtype, PreTrainedModel]:
    """Return the config, the dtype, and transformers' model on the meta device."""
    config = AutoConfig.from_pretrained(checkpoint)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    dtype = config.dtype if config.dtype in (torch.float16, torch.bfloat16) else torch.bfloat16
    # AutoModelForCausalLM does not have all models with a vision tower.
    named = getattr(transformers, (config.architectures or [""])[0], None)
    with torch.device("meta"):
        if named is None:
            skeleton = AutoModelForCausalLM.from_config(config, dtype=dtype)
        else:
            skeleton = named._from_config(config, dtype=dtype)
    return config, dtype, skeleton


def _modules_of(model: PreTrainedModel, stored: Iterable[str]) -> dict[str, str]:
    """Return the name of each stored module in transformers' model, by its name in the checkpoint.

    transformers renames the modules of some models, such as `language_model.model` of LLaVA.
    """
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    state, prefix = model.state_dict(), model.base_model_prefix
    modules = {}
    for name in stored:
        weight = f"{name}.weight"
        renamed, _ = rename_source_key(weight, renamings, [], prefix, state)
        found = renamed if renamed in state else weight
        if found in state:
            modules[name] = found.removesuffix(".weight")
    return modules


def _read_tensors(checkpoint: Path) -> Tensors:
    """Return all tensors except the scales of the KV cache and of queries.

    Neither the KV cache nor the queries of the reference are quantized.
    """
    tensors: Tensors = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        watch_for_cuts(file)
        tensors |= load_file(file)
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(KV_SCALES)}


def schemes_of_layers(
    linears: Mapping[str, Module], stored: StoredQuantization | None, tensors: Tensors
) -> dict[str, QuantizationScheme]:
    """Return the scheme of each quantized linear layer.

    As in vLLM (find_matched_target), this is the first config group with a target that matches the
    layer's name. Without such a group, it is the first with a target that matches the class.

    A layer without a stored scale is not quantized, even if a target matches it, such as the
    output head with the target `Linear`. vLLM does not quantize it either.
    """
    if stored is None:
        return {}
    method = stored.values.get("quant_method")
    if method != "compressed-tensors":
        found = f"quant_method {method!r}"
        raise InputError.of(rules.REFERENCE, stored.place, found=found)
    with ignore_group_warning():
        config = QuantizationConfig.model_validate(stored.values)
    groups, ignore, schemes = config.config_groups.values(), config.ignore or (), {}
    targets = [(target, group) for group in groups for target in group.targets]
    for name, module in linears.items():
        if is_match(name, module, ignore):
            continue
        by_name = (group for target, group in targets if match_name(name, target))
        by_class = (group for target, group in targets if is_match(name, module, target))
        scheme = next(chain(by_name, by_class), None)
        if scheme is not None and (scheme.weights is None or f"{name}.weight_scale" in tensors):
            schemes[name] = scheme.model_copy(update={"format": scheme.format or config.format})
    return schemes


def _dequantize(
    name: str, scheme: QuantizationScheme, tensors: Tensors, dtype: torch.dtype
) -> Tensors:
    """Replace a layer's stored tensors by its weight. Return the stored scales of its input."""
    prefix = f"{name}."
    names = [name for name in tensors if name.startswith(prefix)]
    state = {name.removeprefix(prefix): tensors.pop(name) for name in names}
    if "bias" in state:
        tensors[f"{prefix}bias"] = state.pop("bias")
    inputs = {key: value for key, value in state.items() if key.startswith("input_")}
    if scheme.weights is None:
        tensors[f"{prefix}weight"] = state["weight"]
        return inputs
    args = arguments_of(scheme)
    storage = nearest_format(args, str(scheme.format))
    tensors[f"{prefix}weight"] = storage.dequantize(args, state).to(dtype)
    return inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceTransform:
    """A transform of linear layers' inputs or outputs.

    `matrices` maps the size of each stored matrix (size, size) to the matrix.
    """

    args: TransformArgs
    head_dim: int | None
    matrices: Mapping[int, torch.Tensor]

    def attach(self, model: Module) -> None:
        """Attach the transform to the layers of a model that it targets."""
        for name, module in model.named_modules():
            if isinstance(module, Linear) and is_match(
                name, module, self.args.targets, self.args.ignore
            ):
                self._hook(module)

    def _hook(self, module: Linear) -> None:
        args, is_input = self.args, self.args.location == INPUT
        matrix = self.matrices[
            self.head_dim or (module.in_features if is_input else module.out_features)
        ]
        matrix = (matrix.T if args.inverse else matrix) / matrix.shape[0] ** 0.5

        def rotated(value: torch.Tensor) -> torch.Tensor:
            exact: torch.Tensor = apply_transform_weight(
                matrix, value.to(matrix.dtype), args.location, Linear
            )
            return exact.to(value.dtype)

        if is_input:
            module.register_forward_pre_hook(lambda _, inputs: (rotated(inputs[0]), *inputs[1:]))
        else:
            module.register_forward_hook(lambda _, inputs, output: rotated(output))


def _take_transforms(
    stored: StoredQuantization | None, tensors: Tensors
) -> list[ReferenceTransform]:
    """Return the online transforms of linear layers, and remove their matrices from `tensors`.

    Raises InputError if a transform belongs to attention, because vLLM does not run attention
    transforms.
    """
    if stored is None or not (raw := stored.values.get("transform_config")):
        return []
    transforms = []
    for name, scheme in TransformConfig.model_validate(raw).config_groups.items():
        for args in filter(TransformArgs.is_online, scheme.apply):
            if args.location not in (INPUT, OUTPUT):
                found = f"a transform of {args.location}"
                raise InputError.of(rules.REFERENCE, stored.place, found=found)
            keys = [key for key in tensors if key.endswith(f".{name}_{args.location}.weight")]
            matrices = {len(matrix): matrix for matrix in map(tensors.pop, keys)}
            transforms.append(
                ReferenceTransform(args=args, head_dim=scheme.head_dim, matrices=matrices)
            )
    return transforms
