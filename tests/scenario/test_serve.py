"""What may be said of the engine in a scenario or on the command line, and what is refused, and why."""

from pathlib import Path

import pytest

from tests.command import vexport
from vexport.errors import InputError
from vexport.scenario import read_scenario
from vexport.scenario.serve import Serve, with_options

SCENARIO = "name: n\nsource: {source}\nrules: [{{match: Linear, scheme: NVFP4A16}}]\nserve: {serve}\n"
DEMO = Path(__file__).parents[2] / "scenarios" / "demo" / "model"


def served(folder: Path, serve: str) -> Serve:
    path = folder / "scenario.yaml"
    path.write_text(SCENARIO.format(source=DEMO, serve=serve))
    return read_scenario(path).serve


def refused(folder: Path, serve: str) -> list[str]:
    with pytest.raises(InputError) as caught:
        served(folder, serve)
    return str(caught.value).splitlines()


def test_every_argument_of_vllm_can_be_given(tmp_path: Path) -> None:
    serve = served(
        tmp_path,
        "{tensor_parallel_size: 2, kv_cache_dtype: fp8, engine_args: {block-size: 32, max_num_seqs: 8,"
        " enable_prefix_caching: false}}",
    )
    assert serve.given == {
        "tensor_parallel_size": 2,
        "max_num_seqs": 8,
        "kv_cache_dtype": "fp8",
        "block_size": 32,
        "enable_prefix_caching": False,
    }
    assert (serve.devices, serve.dry_ranks, serve.planned_ranks) == (2, (2,), (2,))


def test_what_quantizes_the_model_is_not_for_the_baseline(tmp_path: Path) -> None:
    serve = served(
        tmp_path,
        "{kv_cache_dtype: fp8, pipeline_parallel_size: 2, engine_args: {quantization: fp8, block_size: 32}}",
    )
    assert set(serve.arguments(is_baseline=True)) == {"pipeline_parallel_size", "block_size"}
    assert serve.arguments(is_baseline=False) == serve.given


def test_the_sizes_of_the_dry_load_have_two_names(tmp_path: Path) -> None:
    old, new = (served(tmp_path, f"{{{key}: [1, 4]}}") for key in ("tensor_parallel", "dry_tensor_parallel"))
    assert old == new
    assert (new.dry_ranks, new.ranks) == ((1, 4), 1)


def test_the_size_that_runs_is_planned_too(tmp_path: Path) -> None:
    serve = served(tmp_path, "{tensor_parallel_size: 4, dry_tensor_parallel: [1, 2]}")
    assert (serve.dry_ranks, serve.planned_ranks) == ((1, 2), (1, 2, 4))


def test_all_contradictions_and_refusals_at_once(tmp_path: Path) -> None:
    lines = refused(
        tmp_path,
        "{tensor_parallel_size: 2, gpu_memory_utilization: 1.5, engine_args: {tensor_parallel_size: 4, "
        "enable_prefix_caching: true, seed: 3, model: x, load_format: dummy}}",
    )
    found = {line.partition("serve.")[2].partition(":")[0]: line for line in lines}
    assert list(found) == [
        "gpu_memory_utilization",
        *(f"engine_args.{name}" for name in ("tensor_parallel_size", "enable_prefix_caching", "seed")),
        *(f"engine_args.{name}" for name in ("model", "load_format")),
    ]
    assert "got 4, need 2, as tensor_parallel_size has it" in found["engine_args.tensor_parallel_size"]
    assert "log-probabilities" in found["engine_args.enable_prefix_caching"]
    assert "use evaluate.seed" in found["engine_args.seed"]


def test_the_command_line_replaces_what_a_scenario_says() -> None:
    serve = Serve(tensor_parallel_size=4, max_num_seqs=8, engine_args={"block_size": 16, "dtype": "float32"})
    changed = with_options(
        serve, {"tensor_parallel_size": 2}, {"block_size": 32, "gpu_memory_utilization": 0.5}
    )
    assert changed.given == {
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.5,
        "max_num_seqs": 8,
        "block_size": 32,
        "dtype": "float32",
    }


def test_a_dry_load_starts_no_engine_that_could_have_arguments() -> None:
    ran = vexport("load", DEMO, "--dry", "--engine-arg", "max_num_seqs=8")
    assert ran.code == 2
    assert "do not go with --dry" in ran.stderr
    mode = vexport("load", DEMO, "--engine-arg", "enforce_eager=true")
    assert mode.code == 2
    assert "use --mode" in mode.stderr
