"""Observers attached to modules, compared with compressed-tensors' formulas."""

import runpy
from pathlib import Path

import pytest
import torch
import transformers
from compressed_tensors.offload import disable_offloading, offload_module
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    initialize_module_for_quantization,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from tests.texts import assert_contains, assert_raises
from vexport.calibration import (
    calibrate_input_hook,
    calibrate_key_hook,
    calibrate_output_hook,
    calibrate_query_hook,
    calibrate_value_hook,
    freeze_module_quantization,
    get_modules,
    initialize_observer,
    observe,
    update_qparams,
)
from vexport.errors import CheckpointFailed
from vexport.formats.schemes import get_scheme
from vexport.observers import (
    MemorylessMinMaxObserver,
    MinMaxObserver,
    Observer,
    StaticMinMaxObserver,
    fuse_weight_observers,
)

EXAMPLE = Path(__file__).parent.parent.parent / "scenarios" / "observers_example.py"


def linear(scheme: object) -> torch.nn.Linear:
    torch.manual_seed(0)
    module = torch.nn.Linear(64, 32, bias=False)
    module.quantization_scheme = scheme  # type: ignore[assignment]
    return module


def args(**changes: object) -> QuantizationArgs:
    return QuantizationArgs(
        **{"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, **changes}
    )


def scheme_of(**parts: QuantizationArgs) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], **parts)


@pytest.mark.parametrize("initialized", [False, True])
@pytest.mark.parametrize("name", ["FP8", "FP8_DYNAMIC", "W4A16", "W8A8"])
def test_weight_scales_equal_compressed_tensors(name: str, initialized: bool) -> None:
    """The parameters exist already if compressed-tensors has initialized them."""
    scheme = preset_name_to_scheme(name, ["Linear"])
    scheme.weights.group_size = 32 if name == "W4A16" else None
    module = linear(scheme)
    if initialized:
        initialize_module_for_quantization(module, scheme)
    initialize_observer(module, "weight")
    observe(module, "weight")
    update_qparams(module, "weight")
    weight = module.weight.reshape(32, -1, 32) if name == "W4A16" else module.weight
    dims = (0, 1) if name == "FP8" else (-1,)
    low, high = weight.amin(dims), weight.amax(dims)
    scale, _ = calculate_qparams(low, high, scheme.weights)
    found = module.get_parameter("weight_scale")
    assert torch.equal(found.flatten(), scale.flatten().to(found.dtype))
    assert not module.get_parameter("weight_zero_point").float().any()


def test_local_dynamic_inputs_have_global_scale() -> None:
    module = linear(preset_name_to_scheme("NVFP4", ["Linear"]))
    initialize_observer(module, "input")
    value = torch.randn(2, 5, 64)
    calibrate_input_hook(module, (value,))
    calibrate_input_hook(module, (value * 2,))
    update_qparams(module, "input")
    assert isinstance(module.input_observer, StaticMinMaxObserver)
    assert torch.equal(
        module.get_parameter("input_global_scale"),
        generate_gparam(2 * value.min(), 2 * value.max()),
    )
    assert [name for name, _ in module.named_parameters()] == ["weight", "input_global_scale"]


def test_modules_without_observer() -> None:
    """Dynamic inputs and parts without arguments get no observer."""
    module = linear(preset_name_to_scheme("FP8_DYNAMIC", ["Linear"]))
    for base_name in ("input", "output"):
        initialize_observer(module, base_name)
        observe(module, base_name, torch.ones(1, 64))
    initialize_observer(torch.nn.Linear(2, 2), "weight")
    update_qparams(module, ("input", "output"))
    assert not [name for name, _ in module.named_modules() if name]


@pytest.mark.parametrize("observer", ["static_minmax", "minmax", None])
def test_weight_observers_have_no_memory(observer: str | None) -> None:
    module = linear(scheme_of(weights=args(observer=observer)))
    initialize_observer(module, "weight")
    assert isinstance(module.weight_observer, MemorylessMinMaxObserver)
    observe(module, "weight", module.weight * 100)
    observe(module, "weight")
    update_qparams(module, "weight")
    assert module.get_parameter("weight_scale").item() == pytest.approx(
        module.weight.abs().max().item() / 448
    )


def test_schemes_of_vexport() -> None:
    module = linear(get_scheme("FP8").args)
    for base_name in ("weight", "input"):
        initialize_observer(module, base_name)
    module.register_forward_pre_hook(calibrate_input_hook)
    observe([module], "weight")
    value = torch.randn(3, 64)
    module(value)
    update_qparams([module], ["weight", "input"])
    assert module.get_parameter("input_scale").item() == pytest.approx(
        value.abs().max().item() / 448
    )


def test_outputs_and_attention_states() -> None:
    """A hook observes outputs without changing them.

    Queries, keys and values are observed by head.
    """
    module = linear(
        scheme_of(
            output_activations=args(observer="minmax"), input_activations=args(strategy="attn_head")
        )
    )
    for base_name in ("output", "q", "k", "v"):
        initialize_observer(module, base_name)
    assert isinstance(module.output_observer, MinMaxObserver)
    module.register_forward_hook(calibrate_output_hook)
    value = torch.randn(4, 64)
    output = module(value)
    assert torch.equal(output, torch.nn.functional.linear(value, module.weight))
    states = torch.randn(2, 4, 7, 16)  # batch, heads, tokens, head size
    for hook, factor in (
        (calibrate_query_hook, 1),
        (calibrate_key_hook, 2),
        (calibrate_value_hook, 3),
    ):
        hook(module, states * factor)
    update_qparams(module, ("output", "q", "k", "v"))
    assert module.get_parameter("output_scale").item() == pytest.approx(
        output.abs().max().item() / 448
    )
    per_head = states.abs().amax((0, 2, 3)) / 448
    for name, factor in (("q", 1), ("k", 2), ("v", 3)):
        assert torch.allclose(module.get_parameter(f"{name}_scale").flatten(), per_head * factor)


def test_missing_tokens_and_unknown_names_are_refused() -> None:
    module = linear(preset_name_to_scheme("FP8", ["Linear"]))
    initialize_observer(module, "input")
    observe(module, "input", torch.empty(0, 64))
    with pytest.raises(CheckpointFailed, match=r"Linear\(in_features=64,.*: input: .*\b0 tokens"):
        update_qparams(module, "input")
    module.register_forward_pre_hook(calibrate_input_hook)
    with assert_raises(ValueError, "got tuple", "observer", "tensor"):
        module(input=torch.ones(1, 64))
    module = linear(preset_name_to_scheme("FP8", ["Linear"]))
    with assert_raises(ValueError, "'weights'", "one of weight, input, output, q"):
        initialize_observer(module, "weights")
    with pytest.raises(ValueError, match="no input_observer"):
        calibrate_input_hook(module, (torch.ones(1, 64),))


@pytest.mark.parametrize("scheme", ["FP8", "NVFP4"])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_non_finite_inputs_are_refused(scheme: str, bad: float) -> None:
    module = linear(preset_name_to_scheme(scheme, ["Linear"]))
    initialize_observer(module, "input")
    value = torch.ones(4, 64)
    value[2, 17] = bad
    observe(module, "input", value)
    with pytest.raises(CheckpointFailed, match="input: got values that are not finite"):
        update_qparams(module, "input")


def test_freezing_removes_observers() -> None:
    model = torch.nn.Sequential(linear(preset_name_to_scheme("FP8", ["Linear"])), torch.nn.ReLU())
    for base_name in ("weight", "input"):
        initialize_observer(model[0], base_name)
    model.apply(freeze_module_quantization)
    model.apply(freeze_module_quantization)
    assert [name for name, _ in model.named_modules() if name] == ["0", "1"]
    assert model[0].quantization_status == "frozen"


def test_offloaded_modules() -> None:
    """Existing values are updated in their dtype."""
    scheme = preset_name_to_scheme("FP8", ["Linear"])
    module = linear(scheme)
    initialize_module_for_quantization(module, scheme)
    offload_module(module, "cpu", "cpu")
    initialize_observer(module, "weight")
    observe(module, "weight")
    update_qparams(module, "weight")
    assert torch.equal(
        module.get_parameter("weight_scale"), module.weight.abs().max().reshape(1) / 448
    )
    assert module.get_parameter("weight_zero_point").dtype == torch.float8_e4m3fn


def test_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    gate, up, down = capsys.readouterr().out.splitlines()
    assert_contains(gate, "gate: 256 tokens", "weight scales (128, 4)", "weight global scale")
    assert gate.removeprefix("gate") == up.removeprefix("up")
    assert down.startswith("down: 256 tokens")


@pytest.mark.parametrize(
    ("bad", "observer"), [(torch.inf, "memoryless_minmax"), (torch.nan, "memoryless_mse")]
)
@pytest.mark.parametrize(
    "changes",
    [
        {"strategy": "tensor"},
        {"strategy": "channel"},
        {"strategy": "group", "group_size": 32},
        {"strategy": "block", "block_structure": [16, 16]},
        {
            "num_bits": 4,
            "strategy": "tensor_group",
            "group_size": 16,
            "scale_dtype": "torch.float8_e4m3fn",
        },
    ],
)
def test_non_finite_weights_are_refused(
    changes: dict[str, object], observer: str, bad: float
) -> None:
    module = linear(scheme_of(weights=args(observer=observer, **changes)))
    module.weight.data[3, 5] = bad
    initialize_observer(module, "weight")
    observe(module, "weight")
    with assert_raises(CheckpointFailed, "weight:", "not finite"):
        update_qparams(module, "weight")
    assert not hasattr(module, "weight_scale")


def observe_weights(model: torch.nn.Module, scheme: str) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.quantization_scheme = preset_name_to_scheme(scheme, ["Linear"])
            initialize_observer(module, "weight")
    fuse_weight_observers(model)
    modules = get_modules(model, "weight")
    observe(modules, "weight")
    update_qparams(modules, "weight")


def shared_scale(*layers: torch.nn.Module) -> torch.Tensor:
    """Return compressed-tensors' global scale of the layers, and check that all layers have it."""
    low = torch.stack([layer.get_parameter("weight").min() for layer in layers]).min()
    high = torch.stack([layer.get_parameter("weight").max() for layer in layers]).max()
    expected: torch.Tensor = generate_gparam(low, high)
    for layer in layers:
        assert torch.equal(layer.get_parameter("weight_global_scale"), expected)
    return expected


def test_fused_weights_share_global_scale(llama: Path) -> None:
    """A whole model is fused by its class, a single decoder layer by the usual fused layers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    for part in (model, model.model.layers[0]):
        observe_weights(part, "NVFP4A16")
        layer = model.model.layers[0]
        attention, mlp = layer.self_attn, layer.mlp
        scale = shared_scale(attention.q_proj, attention.k_proj, attention.v_proj)
        assert not torch.equal(scale, shared_scale(attention.o_proj))
        shared_scale(mlp.gate_proj, mlp.up_proj)


def test_fused_layers_need_one_strategy(llama: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    attention = model.model.layers[0].self_attn
    for layer, scheme in ((attention.q_proj, "NVFP4A16"), (attention.k_proj, "FP8")):
        layer.quantization_scheme = preset_name_to_scheme(scheme, ["Linear"])
        initialize_observer(layer, "weight")
    with pytest.raises(ValueError, match=r"qkv_proj: .*q_proj tensor_group.*v_proj none"):
        fuse_weight_observers(model)


class Halved(Observer):
    """Observer in the form of llm-compressor's older documents: half of the largest magnitude."""

    def calculate_qparams(
        self,
        observed: torch.Tensor,
        reduce_dims: tuple[int, ...] | None = None,
        tensor_id: object = None,
        global_scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale, zero_point = super().calculate_qparams(observed, reduce_dims, None, global_scale)
        return scale / 2, zero_point


def test_older_observer_interface() -> None:
    """The observer computes scales of weights and of inputs."""
    name = f"{__name__}:Halved"  # a registered name would remain for later tests
    weights = args(observer=name, strategy="channel")
    module = linear(scheme_of(weights=weights, input_activations=args(observer=name)))
    for base_name in ("weight", "input"):
        initialize_observer(module, base_name)
    module.register_forward_pre_hook(calibrate_input_hook)
    observe(module, "weight")
    value = torch.randn(4, 64)
    module(value)
    update_qparams(module, ("weight", "input"))
    expected = module.weight.abs().amax(1, keepdim=True) / 448 / 2
    torch.testing.assert_close(module.get_parameter("weight_scale"), expected)
    assert module.get_parameter("input_scale").item() == pytest.approx(
        value.abs().max().item() / 448 / 2
    )


def test_weight_g_idx_orders_columns() -> None:
    grouped = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    g_idx = torch.arange(64) % 2
    scales = []
    for mapped in (True, False):
        module = linear(scheme_of(weights=args(**grouped)))
        if mapped:
            module.register_parameter(
                "weight_g_idx", torch.nn.Parameter(g_idx, requires_grad=False)
            )
        else:
            module.weight.data = module.weight.data[:, torch.argsort(g_idx, stable=True)]
        initialize_observer(module, "weight")
        observe(module, "weight")
        update_qparams(module, "weight")
        scales.append(module.get_parameter("weight_scale"))
    assert torch.equal(*scales)


def test_only_onloaded_value_is_updated(tmp_path: Path) -> None:
    """The copy on disk keeps its values. Without the flag, it changes too."""
    scheme = preset_name_to_scheme("FP8", ["Linear"])
    module = linear(scheme)
    initialize_module_for_quantization(module, scheme)
    module.get_parameter("weight_scale").data.fill_(7)
    offload_module(module, "cpu", "disk", offload_dir=str(tmp_path))
    initialize_observer(module, "weight")
    expected = module.weight.abs().max().reshape(1) / 448
    observe(module, "weight")
    with disable_offloading():
        update_qparams(module, "weight", only_update_onload=True)
        assert torch.equal(module.get_parameter("weight_scale"), expected)
    assert module.get_parameter("weight_scale").item() == 7
    update_qparams(module, "weight")
    assert torch.equal(module.get_parameter("weight_scale"), expected)


def test_fused_layers_are_searched_together() -> None:
    """The result does not depend on the number of calls that update them."""
    scales = list[float]()
    for together in (True, False):
        layers = torch.nn.ModuleDict()
        for seed, name in enumerate(("q_proj", "k_proj", "v_proj")):
            scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
            scheme.weights.observer = "nvfp4_expanded_mse"
            layers[name] = linear(scheme)
            generator = torch.Generator().manual_seed(seed)
            layers[name].weight.data = torch.rand(32, 64, generator=generator) * 2 - 1
            initialize_observer(layers[name], "weight")
        fuse_weight_observers(layers)
        observe(layers.values(), "weight")
        if together:
            update_qparams(list(layers.values()), "weight")
        for layer in () if together else layers.values():
            update_qparams(layer, "weight")
            freeze_module_quantization(layer)
        found = {
            float(layer.get_parameter("weight_global_scale").detach()) for layer in layers.values()
        }
        assert len(found) == 1
        scales += found
        largest = max(
            float(layer.get_parameter("weight").detach().abs().max()) for layer in layers.values()
        )
    assert scales[0] == scales[1]
    assert scales[0] == pytest.approx(448 * 6 / largest / 1.5)
