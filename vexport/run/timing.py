"""How fast checkpoints are in vLLM: one engine after the other, each with nothing else to do."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from vexport.checkpoint.index import require_checkpoint
from vexport.checkpoint.source import resolve_source
from vexport.engine.arguments import require_arguments, require_heads, require_layers
from vexport.engine.load import refused, shortest_length
from vexport.engine.messages import SessionRequest
from vexport.engine.session import EngineFault, engines_share_imports, log_folder, require_vllm, run_session
from vexport.errors import InputError
from vexport.errors.extras import attempt_all
from vexport.run.directory import Digests, FolderDigest, value_digest
from vexport.run.making import checkpoint_inputs
from vexport.run.serving import BASELINE, CANDIDATE, EngineOptions, serve_digest
from vexport.run.state import LOADED, Run
from vexport.types import ENGINE_CHECK, NOT_MEASURED_HERE, Finding, SpeedReport, Workload

# What an engine takes at once without being told (vexport.engine.cpu; vLLM's own default is higher).
_SEQUENCES = 64


@engines_share_imports()
def time_checkpoints(
    names: Mapping[str, str], workload: Workload, options: EngineOptions
) -> list[SpeedReport]:
    """A report for each checkpoint, in order; `names` has the role of each.

    Before the first engine starts, raises InputError where one cannot be read or is too short for the
    workload, EnvironmentFault where there is no vLLM. What stops an engine later is in its report.
    """
    require_vllm(options.vllm_python)

    def fitting(name: str) -> Path:
        root = resolve_source(name, options.on_progress)
        require_checkpoint(root)
        require_layers(root)
        require_heads(root, options.serve.ranks)
        require_length(root, workload, options)
        return root

    roots = attempt_all((name, partial(fitting, name)) for name in names)
    require_arguments([options.serve], options.vllm_python)
    return [
        _timed(name, root, names[name], workload, options) for name, root in zip(names, roots, strict=True)
    ]


def require_length(root: Path, workload: Workload, options: EngineOptions) -> None:
    """InputError where a sequence of the workload is longer than a model takes."""
    longest = shortest_length(root, options.serve.max_model_len or workload.length)
    if longest < workload.length:
        raise InputError(
            str(root),
            got=f"{workload.input_len} input and {workload.output_len} output tokens",
            need=f"at most {longest} together, which this model takes",
            fix="lower input_len or output_len (--input-len, --output-len)",
        )


def is_timed(run: Run) -> bool:
    """Whether the scenario asks for it, of a checkpoint that vLLM loads."""
    loaded = run.get(LOADED)
    return run.scenario.speed is not None and loaded is not None and loaded.ok


def baseline_inputs(run: Run) -> Digests:
    """What the baseline's speed depends on."""
    return {"baseline": FolderDigest(run.baseline), **_work(run, is_baseline=True)}


def candidate_inputs(run: Run) -> Digests:
    """What the checkpoint's speed depends on."""
    return {**checkpoint_inputs(run), **_work(run, is_baseline=False)}


def _work(run: Run, *, is_baseline: bool) -> Digests:
    serve, speed = run.scenario.serve.arguments(is_baseline=is_baseline), run.scenario.speed
    assert speed is not None
    return {"serve section": serve_digest(serve), "speed section": value_digest(speed.model_dump())}


def time_baseline(run: Run) -> SpeedReport:
    """The baseline's speed."""
    return replace(_stage(run, BASELINE, run.baseline), role="baseline")


def time_candidate(run: Run) -> SpeedReport:
    """The checkpoint's speed; no engine is started for one that the load has shown to be emulated."""
    engine = run.result(LOADED).engine
    if engine is not None and engine.emulated:
        name = str(run.checkpoint)
        return SpeedReport(
            checkpoint=name, ok=True, findings=(), vllm=engine.vllm, unmeasured=NOT_MEASURED_HERE
        )
    return _stage(run, CANDIDATE, run.checkpoint)


def _stage(run: Run, role: str, checkpoint: Path) -> SpeedReport:
    assert run.scenario.speed is not None
    log = run.folder / "eval" / role / "speed.log"
    return measure_speed(checkpoint, role, run.scenario.speed.workload, log, run.options)


def measure_speed(
    checkpoint: Path, role: str, workload: Workload, log: Path, options: EngineOptions
) -> SpeedReport:
    """Time one checkpoint; what vLLM refuses, or emulates, is a report without a measurement.

    EngineFault where the engine dies.
    """
    serve = options.serve
    arguments = dict(serve.arguments(is_baseline=role == BASELINE))
    if max(workload.concurrency) > _SEQUENCES:
        arguments.setdefault("max_num_seqs", max(workload.concurrency))
    request = SessionRequest(
        checkpoint=checkpoint,
        name=role,
        enforce_eager=serve.enforce_eager,
        trust_remote_code=options.trust_remote_code,
        max_model_len=serve.max_model_len or workload.length,
        arguments=arguments,
        workload=workload,
    )
    result = run_session(
        request,
        log=log,
        timeout=serve.timeout,
        vllm_python=options.vllm_python,
        on_progress=lambda stage, done, total: options.on_progress(f"{role}: {stage}", done, total),
    )
    report = SpeedReport(checkpoint=str(checkpoint), ok=result.failure is None, findings=(), vllm=result.vllm)
    if result.failure is not None:
        return replace(report, findings=(refused(result),), unmeasured="vLLM refuses it")
    report = replace(report, engine=result.engine, start_seconds=result.seconds["load"])
    if result.throughput is None:
        return replace(report, unmeasured=NOT_MEASURED_HERE)
    measured = result.throughput
    return replace(
        report, points=measured.points, kv_tokens=measured.kv_tokens, weight_bytes=measured.weight_bytes
    )


def _timed(name: str, root: Path, role: str, workload: Workload, options: EngineOptions) -> SpeedReport:
    """One checkpoint of `vexport bench`. The log of a session that died is kept, and named."""
    try:
        with log_folder("vexport-load-") as folder:
            report = measure_speed(root, role, workload, folder / "vllm.log", options)
    except EngineFault as fault:
        finding = Finding.of(fault, check=ENGINE_CHECK, severity="error")
        tail = fault.failure.log_tail
        report = SpeedReport(checkpoint=name, ok=False, findings=(finding,), log_tail=tail)
        report = replace(report, unmeasured=fault.failure.kind)
    return replace(report, checkpoint=name, role="baseline" if role == BASELINE else "checkpoint")
