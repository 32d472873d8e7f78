"""Reports as a run of the demo model would write them; the numbers are plausible, not measured."""

from dataclasses import replace

from tests.reports import parts
from vexport.records import (
    Canary,
    CheckReport,
    Comparison,
    EngineInfo,
    Finding,
    Flip,
    FusionGroup,
    LayerError,
    LinearPlan,
    LoadReport,
    LogprobAgreement,
    Outcome,
    Plan,
    Report,
    Score,
    TaskVerdict,
    Verdict,
)

HOSTILE = (
    "<script>alert(1)</script> ]]> \"'`|*_[x](http://evil.example/a) @team\n::error::x\x1b[31mred"
    "\x00\x9b2J\u202eabc\ud800\ufffe &amp; {{ 7*7 }} {% raw %} [bold]b[/bold] %0A##[error]y www.evil.example"
)
_MODULES = (
    ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), 21.4),
    ("self_attn.o_proj", ("self_attn.o_proj",), 20.6),
    ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"), 20.9),
    ("mlp.down_proj", ("mlp.down_proj",), 19.2),
)


def finding(severity: str = "warning", *, where: str = "model.layers.2.mlp.down_proj") -> Finding:
    """A finding of each severity."""
    if severity == "error":
        return Finding(
            check="fused-scales",
            severity="error",
            where=where,
            expected="one weight_global_scale for q_proj, k_proj and v_proj",
            got="0.00217, 0.00217 and 0.00304",
            fix="export again, or run vexport repair",
        )
    return Finding(
        check="tensor-parallel",
        severity="warning" if severity == "warning" else "info",
        where=where,
        expected="512 input features divisible by 4 x 16 at tensor parallel 4",
        got="in_features 512 with group size 16",
        fix="nothing up to tensor parallel 4; keep down_proj above it",
    )


def plan(layers: int = 3) -> Plan:
    """The demo model's plan: every linear layer of every block to NVFP4, lm_head kept."""
    groups = tuple(
        FusionGroup(
            name=f"model.layers.{index}.{fused}",
            scheme="NVFP4",
            observer="memoryless_mse",
            members=tuple(_linear(f"model.layers.{index}.{member}") for member in members),
        )
        for index in range(layers)
        for fused, members, _ in _MODULES
    )
    return Plan(
        source="demo/model",
        architecture="LlamaForCausalLM",
        groups=groups,
        kept=("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"),
        kept_linears=("lm_head",),
        source_bytes=3_938_304,
        output_bytes=1_363_968,
        parameters=1_969_152,
    )


def layer_errors(layers: int = 3) -> tuple[LayerError, ...]:
    """Signal-to-noise of every layer: a fixed spread around each kind's mean."""
    return tuple(
        LayerError(
            name=f"model.layers.{index}.{member}",
            scheme="NVFP4",
            snr_db=mean
            + 1.3 * (((7 * index + 3 * place) % 11) / 11 - 0.5)
            - (4.2 if index == layers - 1 else 0),
        )
        for index in range(layers)
        for _, members, mean in _MODULES
        for place, member in enumerate(members)
    )


def engine() -> EngineInfo:
    """vLLM's CPU backend with emulated NVFP4 kernels."""
    return EngineInfo(
        vllm="0.32.0",
        torch="2.13.0+cpu",
        transformers="5.19.1",
        platform="cpu",
        processor="Intel Xeon Platinum 8481C",
        dtype="bfloat16",
        multiprocess=False,
        settings={
            "tensor_parallel_size": "2",
            "distributed_executor_backend": "mp",
            "kv_cache_dtype": "fp8",
            "engine_args": '{"block_size": 32}',
        },
        emulated=True,
        kernels=("qkv_proj, o_proj: CompressedTensorsW4A4Fp4 (emulated)", "lm_head: unquantized"),
        blind_spots=(
            "FlashInfer and CUTLASS NVFP4 kernels of sm100 were not run",
            "tensor parallel above 1 was checked from shapes, not run",
        ),
        start_seconds=8.42,
    )


def load(checkpoint: str = "runs/demo-nvfp4/checkpoint") -> LoadReport:
    """A load that passed."""
    return LoadReport(
        checkpoint=checkpoint,
        ok=True,
        findings=(),
        engine=engine(),
        canaries=(
            Canary(
                prompt="the capital of norland is",
                text=" oster , and its river is the vell",
                tokens=8,
                finish_reason="length",
            ),
            Canary(prompt="12 + 39 =", text=" 1 5", tokens=2, finish_reason="stop"),
        ),
        logprobs=LogprobAgreement(
            reference="transformers with the exported weights",
            prompts=16,
            positions=1936,
            mean_kl=0.000412,
            max_kl=0.00783,
            top1_agreement=0.9974,
            limit=0.01,
        ),
    )


def task(
    name: str,
    outcome: Outcome,
    *,
    difference: float,
    low: float,
    high: float,
    lost: int,
    gained: int,
    documents: int = 640,
) -> TaskVerdict:
    """One task's comparison with two example flips."""
    baseline = 0.9938
    return TaskVerdict(
        task=name,
        metric="exact_match",
        filter="none",
        outcome=outcome,
        documents=documents,
        baseline=_score(name, documents, baseline),
        candidate=_score(name, documents, baseline + difference),
        difference=difference,
        low=low,
        high=high,
        right_to_wrong=lost,
        wrong_to_right=gained,
        changed_wrong=1,
        flip_rate=(lost + gained) / documents,
        flip_low=0.0031,
        flip_high=0.0188,
        mcnemar_p=0.289 if outcome != "FAIL" else 0.0000012,
        recovery=1 + difference / baseline,
        recovery_low=0.9812,
        recovery_high=1.0021,
        documents_needed=2810 if outcome == "INCONCLUSIVE" else None,
        flips=(
            Flip(
                doc_id=118,
                prompt="47 + 85 =",
                target="2 3 1",
                baseline="2 3 1",
                candidate="2 2 1",
                direction="right to wrong",
            ),
            Flip(
                doc_id=402,
                prompt="96 + 18 =",
                target="4 1 1",
                baseline="4 0 1",
                candidate="4 1 1",
                direction="wrong to right",
            ),
        ),
    )


def verdict(outcome: Outcome = "PASS") -> Verdict:
    """Two tasks; the second one has the outcome asked for."""
    addition = {
        "PASS": task("addition", "PASS", difference=-0.0047, low=-0.0128, high=0.0031, lost=5, gained=2),
        "FAIL": task("addition", "FAIL", difference=-0.1051, low=-0.1268, high=-0.0853, lost=69, gained=2),
        "INCONCLUSIVE": task(
            "addition", "INCONCLUSIVE", difference=-0.0141, low=-0.0252, high=-0.0047, lost=11, gained=2
        ),
    }[outcome]
    reason = {
        "PASS": "both tasks lose less than 2 points (worst: addition -0.47, at worst -1.28)",
        "FAIL": "addition loses 10.5 points (at least 8.53), 2 points were accepted; the other task passes",
        "INCONCLUSIVE": "addition is not settled after 640 documents: -1.41 points, between -2.52 and -0.47, "
        "2 points were accepted; about 2,900 would settle it; the other task passes",
    }[outcome]
    beside = Comparison(
        task="addition",
        metric="f1",
        filter="strict",
        documents=640,
        baseline=0.9941,
        candidate=0.9877,
        difference=-0.0064,
        low=-0.0139,
        high=0.0011,
        outcome="PASS",
    )
    addition = replace(addition, also=(beside,))
    facts = task("facts", "PASS", difference=0.0, low=-0.0042, high=0.0042, lost=1, gained=1)
    return Verdict(
        outcome=outcome,
        reason=reason,
        margin=0.02,
        alpha=0.05,
        method="paired difference, Tango's score interval, one-sided 95% bounds; every task must pass",
        device="CPU, emulated",
        tasks=(facts, addition),
        pooled=replace(
            beside, task="all tasks", metric="exact_match", filter="none", documents=1280, difference=-0.0033
        ),
        warnings=("vllm was 0.31.0 when the baseline was accepted, it is 0.32.0 now",),
    )


def report(outcome: Outcome = "PASS") -> Report:
    """A run that reached its verdict."""
    judged = verdict(outcome)
    return Report(
        name="demo-nvfp4",
        vexport="0.1.0",
        created="2025-03-14T09:26:53Z",
        command="vexport run scenarios/demo-nvfp4.yaml --run-dir runs/demo-nvfp4",
        source="demo/model",
        baseline="demo/model",
        outcome=outcome,
        reason=judged.reason,
        plan=plan(),
        layers=layer_errors(),
        calibration_rows=128,
        calibration_digest="9f2c1d0f5e7b4c88a1d34e6f7089bb21c0de5a7719e2f3348acd10b5f6e7d819",
        check=CheckReport(checkpoint="runs/demo-nvfp4/checkpoint", ok=True, findings=(finding(),)),
        baseline_load=load("demo/model"),
        load=load(),
        verdict=judged,
        seconds={
            "plan": 0.21,
            "calibrate": 14.8,
            "quantize": 9.4,
            "check": 0.9,
            "load": 31.2,
            "evaluate": 184.0,
        },
    )


def full(outcome: Outcome = "PASS") -> Report:
    """A run with everything that a run can have."""
    base = report(outcome)
    assert base.verdict is not None
    return replace(
        base,
        source_card={"license": "apache-2.0", "language": ("en",)},
        drift=parts.drift(),
        attribution=parts.attribution(),
        sensitivity=parts.sensitivity(),
        mixed=parts.mixed(),
        dry_load=parts.dry_load(),
    )


def unloaded() -> Report:
    """A run that ended at the check: the engine never started with the checkpoint, no verdict on accuracy."""
    error = finding("error", where="model.layers.0.self_attn.qkv_proj")
    checkpoint = "runs/demo-nvfp4/checkpoint"
    return replace(
        report("FAIL"),
        reason=f"check: {error}",
        check=CheckReport(checkpoint=checkpoint, ok=False, findings=(finding(), error, finding("info"))),
        load=LoadReport(checkpoint=checkpoint, ok=False, findings=()),
        verdict=None,
        seconds={"plan": 0.21, "check": 0.9},
    )


def hostile() -> Report:
    """HOSTILE wherever a checkpoint, a model or a data set has a say."""
    base = full("FAIL")
    bad = Finding(check=HOSTILE, severity="error", where=HOSTILE, expected=HOSTILE, got=HOSTILE, fix=HOSTILE)
    flip = Flip(
        doc_id=1,
        prompt=HOSTILE,
        target=HOSTILE,
        baseline=HOSTILE,
        candidate=HOSTILE,
        direction="right to wrong",
    )
    canary = Canary(prompt=HOSTILE, text=HOSTILE, tokens=3, finish_reason=HOSTILE)
    judged = verdict("FAIL")
    tasks = tuple(
        replace(
            task,
            task=HOSTILE,
            metric=HOSTILE,
            filter=HOSTILE,
            flips=(flip,),
            also=tuple(replace(one, task=HOSTILE, metric=HOSTILE) for one in task.also),
        )
        for task in judged.tasks
    )
    spoiled = replace(
        load(HOSTILE),
        ok=False,
        findings=(bad,),
        canaries=(canary,),
        engine=replace(engine(), kernels=(HOSTILE,), blind_spots=(HOSTILE,), processor=HOSTILE),
    )
    return replace(
        base,
        name=HOSTILE,
        source=HOSTILE,
        command=HOSTILE,
        reason=HOSTILE,
        plan=replace(
            base.plan, source=HOSTILE, architecture=HOSTILE, kept_linears=(HOSTILE,), refusals=(bad,)
        ),
        layers=(LayerError(name=HOSTILE, scheme=HOSTILE, snr_db=12.0), *base.layers),
        check=CheckReport(checkpoint=HOSTILE, ok=False, findings=(bad,)),
        baseline_load=spoiled,
        load=spoiled,
        verdict=replace(judged, reason=HOSTILE, method=HOSTILE, tasks=tasks, warnings=(HOSTILE,)),
        source_card={"license": HOSTILE, "language": (HOSTILE,)},
        drift=parts.drift(HOSTILE),
        attribution=parts.attribution(HOSTILE),
        dry_load=parts.dry_load(HOSTILE),
    )


def _linear(name: str) -> LinearPlan:
    return LinearPlan(name=name, weight=f"{name}.weight", out_features=256, in_features=256)


def _score(name: str, documents: int, value: float) -> Score:
    return Score(
        task=name,
        metric="exact_match",
        filter="none",
        documents=documents,
        value=value,
        low=value - 0.0091,
        high=value + 0.0043,
    )
