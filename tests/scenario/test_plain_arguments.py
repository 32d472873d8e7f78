"""A scenario sets plain arguments of vLLM. All other arguments need --trust-remote-code."""

import dataclasses
import json
from pathlib import Path

import pytest
from pydantic import JsonValue

from tests.command import vexport
from vexport.architectures.engine_arguments import ARGUMENTS, argument_types, recorded_version
from vexport.scenario.plain_arguments import code_problems
from vexport.version import PINNED

ROOT = Path(__file__).parents[2]
# Each value is the content of `serve.engine_args`. Settings of everyday serving.
PLAIN: dict[str, dict[str, JsonValue]] = {
    "batches": {"max_num_batched_tokens": 512, "block_size": 32, "async_scheduling": False},
    "online quantization": {"quantization": "fp8", "kv_cache_dtype_skip_layers": ["0"]},
    "quantization of layers": {
        "quantization_config": {
            "linear": {"weight": "fp8_per_tensor_static", "activation": "fp8_per_token"},
            "moe": "mxfp8",
            "ignore": ["re:.*gate$"],
        }
    },
    "compiler": {
        "compilation_config": {
            "mode": 3,
            "backend": "inductor",
            "cudagraph_mode": "full_decode_only",
            "cudagraph_capture_sizes": [1, 2, 4],
            "custom_ops": ["none", "+rms_norm"],
            "pass_config": {"fuse_norm_quant": True},
        }
    },
    "kernels": {"attention_config": {"backend": "flashinfer"}, "moe_backend": "triton"},
    "draft head": {
        "speculative_config": {
            "method": "eagle",
            "model": "heads/v1.2",
            "num_speculative_tokens": 2,
        }
    },
    "longer context": {
        "hf_overrides": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        "max_num_seqs": 8,
    },
    "pictures": {
        "limit_mm_per_prompt": {"image": 1, "video": {"count": 1, "num_frames": 8}},
        "mm_processor_kwargs": {"max_pixels": 1_003_520},
    },
    "disaggregated": {
        "kv_transfer_config": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 1e9},
        }
    },
    "experts": {
        "enable-expert-parallel": True,
        "eplb_config": '{"window_size": 100, "policy": "default"}',
        "logits_processors": [],
    },
}
# Arguments that run code or read it from files, and the place of the error.
CODE: dict[str, dict[str, JsonValue]] = {
    "model_class_overrides.LlamaForCausalLM": {
        "model_class_overrides": {"LlamaForCausalLM": "evil:C"}
    },
    # A dotted model without a method is a class.
    "speculative_config.model": {
        "speculative_config": {"model": "evil.Proposer", "num_speculative_tokens": 1}
    },
    # vLLM does not validate this field, and writes keys with underscores.
    "speculative_config.draft-model-config": {
        "speculative_config": {
            "method": "mtp",
            "draft-model-config": {"model": "org/x", "trust_remote_code": True},
        }
    },
    "speculative_config.method": {
        "speculative_config": '{"method": "custom\\u005fclass", "model": "a/b.C"}'
    },
    "ec_manager_config.encoder_cache_manager_cls": {
        "ec_manager_config": {"encoder_cache_manager_cls": "evil.Manager"}
    },
    "kv_transfer_config.kv_connector_extra_config.spec_module_path": {
        "kv_transfer_config": {
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": {"spec_module_path": "evil", "spec_name": "Spec"},
        }
    },
    "kv_transfer_config.kv_connector_module_path": {
        "kv_transfer_config": '{"kv_connector": "C", "kv\\u005fconnector_module_path": "evil"}'
    },
    # Python's logging creates any object that such a file names.
    "logging_config.pylogging_config_file": {
        "logging_config": {"pylogging_config_file": "logging.json"}
    },
    # Compiled code is loaded from this folder.
    "compilation_config.cache_dir": {"compilation_config": {"cache_dir": "cache"}},
    "compilation_config.inductor_compile_config.joint_custom_post_pass": {
        "compilation_config": {"inductor_compile_config": {"joint_custom_post_pass": "evil.f"}}
    },
    # These words become the command line of numactl.
    "numa_bind_cpus.0": {"numa_bind_cpus": ["0 python evil.py"]},
    # transformers receives these values beside its own.
    "mm_processor_kwargs.trust_remote_code": {"mm_processor_kwargs": {"trust_remote_code": True}},
    "hf_overrides.auto_map": {"hf_overrides": {"auto_map": {"AutoModel": "org/x--m.C"}}},
    "load_format": {"load_format": "theirs"},
    "worker_cls": {"worker-cls": "evil.Worker"},
    "a_later_argument": {"a_later_argument": True},
}


def scenario(folder: Path, source: Path, arguments: object, variant: object = None) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "scenario.yaml"
    content = {
        "name": "theirs",
        "source": str(source),
        "rules": [{"match": "Linear", "scheme": "FP8_DYNAMIC"}],
        "serve": {"engine_args": arguments},
    }
    if variant is not None:
        content["variants"] = {"serve": [{}, variant]}
        content["evaluate"] = {"tasks": [str(ROOT / "scenarios" / "demo" / "tasks" / "facts.yaml")]}
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("name", PLAIN)
def test_plain_arguments_need_no_flag(name: str, llama: Path, tmp_path: Path) -> None:
    ran = vexport("plan", scenario(tmp_path / "theirs", llama, PLAIN[name]))
    assert ran.code == 0, ran.stderr
    for version in ((0, 30), (0, 31), (0, 32), (0, 33)):
        assert not [*code_problems(PLAIN[name], version)]


@pytest.mark.parametrize("place", CODE)
def test_arguments_that_may_run_code(place: str, llama: Path, tmp_path: Path) -> None:
    path = scenario(tmp_path / "theirs", llama, CODE[place])
    for command in (("plan", path), ("run", path, "--run-dir", tmp_path / "run")):
        ran = vexport(*command)
        assert ran.code == 2, ran.stderr
        line = next(line for line in ran.stderr.splitlines() if f"engine_args.{place}: " in line)
        assert "--trust-remote-code" in line
    assert vexport("plan", path, "--trust-remote-code").code == 0
    for version in ((0, 30), (0, 31), (0, 32), (0, 33), (0, 50)):
        assert [*code_problems(CODE[place], version)]


def test_settings_of_variants_are_judged(llama: Path, tmp_path: Path) -> None:
    path = scenario(tmp_path / "plain", llama, {}, {"attention_backend": "TRITON_ATTN"})
    assert vexport("plan", path).code == 0
    for variant in ({"scheduler_cls": "evil.C"}, {"engine_args": {"scheduler-cls": "evil.C"}}):
        path = scenario(tmp_path / "theirs", llama, {"block_size": 16}, variant)
        ran = vexport("plan", path)
        assert ran.code == 2
        assert "variants.serve.1.scheduler_cls: got 'evil.C'" in ran.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "scenarios").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_scenarios_are_plain(path: Path) -> None:
    from vexport.plan.source import require_trusted_scenario
    from vexport.scenario import read_scenario

    require_trusted_scenario(read_scenario(path), path, trusted=False, vllm=PINNED)


def test_message_names_fixed_values(llama: Path, tmp_path: Path) -> None:
    ran = vexport("plan", scenario(tmp_path / "theirs", llama, {"dtype": "float23"}))
    assert ran.code == 2
    assert "dtype: got 'float23', need one of auto, half, float16" in ran.stderr
    ran = vexport("plan", scenario(tmp_path / "theirs", llama, {"blocksize": 23}))
    assert "need a setting of vLLM 0.32 (did you mean block_size?)" in ran.stderr


def test_unrecorded_version_uses_newest() -> None:
    newest = recorded_version((9, 9))
    assert recorded_version((0, 1)) == newest >= (0, 33)
    assert argument_types((9, 9)) == argument_types(newest)
    assert recorded_version(PINNED) == PINNED


@pytest.mark.vllm
def test_record_equals_installed_vllm() -> None:
    """Config classes of the installed vLLM have the recorded fields, and no others."""
    import vllm.config
    from vllm.engine.arg_utils import EngineArgs

    types = argument_types(PINNED)
    for name, fields in types.items():
        cls = EngineArgs if name == ARGUMENTS else getattr(vllm.config, name, None)
        if cls is not None:
            assert {field.name for field in dataclasses.fields(cls) if field.init} == {*fields}
