"""`vexport bench`: what real vLLM does on random prompts, and what other tools measured."""

import json
from pathlib import Path
from statistics import median

import jsonschema
import pytest

from tests.command import vexport
from tests.models import save_llama
from vexport.reports import render_speeds
from vexport.types import Finding, Json, SpeedReport

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "scenarios" / "demo" / "model"
SERVED = Path(__file__).parent / "results" / "vllm-bench-serve.json"
SCHEMA = json.loads((ROOT / "vexport" / "reports" / "bench.schema.json").read_text())


def summary(mean: float, middle: float) -> Json:
    return {"successful": {"mean": mean, "median": middle, "std_dev": 0.0, "count": 9}}


GUIDELLM: Json = {
    "benchmarks": [
        {
            "type_": "generative_benchmark",
            "config": {"strategy": {"type_": "concurrent", "streams": 8}},
            "metrics": {
                "request_totals": {"successful": 9, "errored": 2, "incomplete": 0, "total": 11},
                "request_concurrency": summary(7.2, 7.0),
                "prompt_token_count": summary(512.0, 512.0),
                "output_token_count": summary(128.0, 128.0),
                "output_tokens_per_second": summary(640.0, 631.0),
                "time_to_first_token_ms": summary(55.0, 50.0),
                "inter_token_latency_ms": summary(12.5, 12.0),
            },
        }
    ]
}


def test_results_of_other_tools_are_shown(tmp_path: Path) -> None:
    other = tmp_path / "fp8.json"
    other.write_text(json.dumps(GUIDELLM))
    ran = vexport("bench", "--results", SERVED, "--results", other, "--format", "json")
    assert ran.code == 0, ran.stderr
    reports = json.loads(ran.stdout)
    jsonschema.validate(reports, SCHEMA)
    served, guided = reports
    assert (served["checkpoint"], served["tool"]) == ("org/model-W4A16", "vllm bench serve")
    limited, unlimited = served["points"]
    assert (limited["concurrency"], limited["tokens_per_second"], limited["input_len"]) == (8, 400.0, 1024.0)
    assert (limited["ttft"], limited["itl"]) == (0.12, 0.0189)
    assert (unlimited["concurrency"], unlimited["itl"]) == (64, None)
    assert (guided["checkpoint"], guided["tool"]) == ("fp8", "guidellm")
    (point,) = guided["points"]
    assert (point["concurrency"], point["tokens_per_second"], point["ttft"]) == (8, 640.0, 0.05)
    assert [one["failed"] for one in (limited, unlimited, point)] == [0, 0, 2]
    assert "fp8: 2 requests failed" in vexport("bench", "--results", other).stdout
    ran = vexport("bench", "--results", SERVED)
    assert ran.code == 0
    assert "measured elsewhere, by vllm bench serve" in ran.stdout
    assert "1,024 input tokens, 128 output tokens" in ran.stdout


@pytest.mark.parametrize("text", ["", "{}", "[]", "no JSON", '{"benchmarks": []}'])
def test_what_is_no_result_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.json"
    file.write_text(text)
    ran = vexport("bench", "--results", file)
    assert ran.code == 2
    assert f"--results {file}: got something else, need what `vllm bench serve" in ran.stderr


def test_a_result_without_an_answer_is_no_speed(tmp_path: Path) -> None:
    """What `vllm bench serve` writes, with exit code 0, where no request was answered."""
    lines = [json.loads(line) for line in SERVED.read_text().splitlines()]
    empty = {**lines[0], "completed": 0, "failed": 64, "total_input_tokens": 0, "output_throughput": 0.0}
    file = tmp_path / "served.json"
    file.write_text(json.dumps(empty))
    ran = vexport("bench", "--results", file)
    assert ran.code == 2
    assert "got no request that was answered (64 failed), need answers" in ran.stderr
    file.write_text(f"{json.dumps(empty)}\n{json.dumps(lines[1])}\n")
    ran = vexport("bench", "--results", file, "--format", "json")
    assert ran.code == 0, ran.stderr
    assert [point["concurrency"] for point in json.loads(ran.stdout)[0]["points"]] == [64]


def test_real_files_of_both_tools_are_read() -> None:
    """Written by vLLM 0.32 and guidellm 0.8.1 for the demo model on a CPU; lists of requests left out."""
    served, guided = SERVED.with_name("vllm-bench-serve-0.32.jsonl"), SERVED.with_name("guidellm-0.8.1.json")
    ran = vexport("bench", "--results", served, "--results", guided, "--format", "json")
    assert ran.code == 0, ran.stderr
    one, other = (
        [
            (point["concurrency"], round(point["tokens_per_second"]), point["itl"])
            for point in report["points"]
        ]
        for report in json.loads(ran.stdout)
    )
    assert [(number, rate) for number, rate, _ in one] == [(1, 279), (4, 570), (4, 162), (1, 40)]
    assert [itl is None for _, _, itl in one] == [False, False, True, False]
    assert [(number, rate) for number, rate, _ in other] == [(1, 125), (7, 182), (3, 118), (2, 174)]


def test_nothing_to_time_is_a_usage_error() -> None:
    ran = vexport("bench", "--baseline", "")
    assert (ran.code, "Give a CHECKPOINT, or --results." in ran.stderr) == (2, True)


@pytest.mark.vllm
def test_a_workload_longer_than_the_model_is_refused_at_once(tmp_path: Path) -> None:
    ran = vexport("bench", save_llama(tmp_path / "model"), "--input-len", 100_000)
    assert ran.code == 2
    assert "got 100000 input and 128 output tokens, need at most" in ran.stderr


@pytest.mark.parametrize("form", ["text", "html", "markdown", "json"])
def test_what_vllm_refuses_is_shown_with_its_reason(form: str) -> None:
    finding = Finding(
        check="load", severity="error", where="model", expected="a load", got="no tokenizer", fix="copy it"
    )
    report = SpeedReport(checkpoint="model", ok=False, findings=(finding,), unmeasured="vLLM refuses it")
    shown = render_speeds([report], form)
    assert "no tokenizer" in shown
    assert "vLLM refuses it" in shown


@pytest.mark.vllm
@pytest.mark.slow
def test_native_kernels_are_timed_and_emulated_ones_are_not(tmp_path: Path) -> None:
    outs = {scheme: tmp_path / scheme for scheme in ("W4A16", "NVFP4A16")}
    for scheme, out in outs.items():
        made = vexport("quantize", DEMO, out, "--scheme", scheme, "--rounding", "nearest", "--quiet")
        assert made.code == 0, made.stderr
    work = ("--concurrency", "1,4", "--input-len", 32, "--output-len", 16, "--format", "json", "--quiet")
    ran = vexport("bench", *outs.values(), "--baseline", DEMO, *work)
    assert ran.code == 3, ran.stderr
    assert f"error: {outs['NVFP4A16']}: got no measured speed: its kernels are emulated" in ran.stderr
    reports = json.loads(ran.stdout)
    jsonschema.validate(reports, SCHEMA)
    assert [report["role"] for report in reports] == ["baseline", "checkpoint", "checkpoint"]
    assert [len(report["points"]) for report in reports] == [2, 2, 0]
    for report in reports[:2]:
        assert not report["engine"]["emulated"]
        assert report["start_seconds"] > 0
        assert report["kv_tokens"] > 0
        for point, concurrency in zip(report["points"], (1, 4), strict=True):
            agrees_with_itself(point, concurrency)


def agrees_with_itself(point: dict[str, float], concurrency: int) -> None:
    """Tokens over time, one request after its first token, and a fourth run where three deviate."""
    runs = point["runs"]
    assert isinstance(runs, list)
    middle = median(runs[:3])
    spread = median(abs(run - middle) for run in runs[:3])
    assert len(runs) == (4 if spread > 0.01 * middle else 3)
    assert point["tokens_per_second"] == median(runs)
    assert point["concurrency"] == concurrency
    whole = 16 * concurrency / point["tokens_per_second"]
    assert 0.5 * whole < point["ttft"] + 15 * point["itl"] < 1.5 * whole
