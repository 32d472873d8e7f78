"""Compare what a server runs with a dry load of the checkpoint that it should serve."""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import JsonValue, ValidationError

from vexport.architectures.engine_arguments import ARGUMENTS, argument_types
from vexport.checkpoint.index import weight_files
from vexport.engine.arguments import require_arguments
from vexport.engine.dry.load import (
    CAPABILITIES,
    NOT_DRY,
    DryLoad,
    Require,
    errors_or_uncertainty,
)
from vexport.engine.installed import installed_text, installed_version
from vexport.errors import Inconclusive, InputError
from vexport.files import read_json_object
from vexport.formats.gpus import Card, find_card
from vexport.names import HubName, SourceRef
from vexport.records import DryLoadReport, OnProgress
from vexport.records.served import ComparedValue, ServerComparison
from vexport.records.serving import StartupLog
from vexport.rules import serving as rules
from vexport.scenario.plain_arguments import code_problems
from vexport.scenario.serve import EngineArguments, Serve
from vexport.serving.comparison import (
    cache_value,
    difference_findings,
    differing,
    gaps,
    late_selections,
    model_values,
    remark_findings,
    require_beginning,
    require_same_model,
    selection_values,
    size_value,
    start_values,
    unlogged_kernels,
    with_reason,
)
from vexport.serving.startup_log import read_startup_log

# Arguments with which a user chooses a kernel. The checkpoint was tested without them.
_FORCING = re.compile(r"(?<!executor)_backend$|^(?:kernel|attention)_config$")
# Arguments of the log that name the model, or that a dry load sets by itself.
_OWN = ("model", "served_model_name", "tensor_parallel_size", "distributed_executor_backend")
_CUDA = "cuda"
_CACHED = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)")
_NO_TOOLKIT = "as on a host without a CUDA toolkit (nvcc)"
_NO_GPU = "the kernels: name the server's GPU with --gpu or --sm"
_SEVERAL_GPUS = "the kernels: --gpu or --sm must name one compute capability"
_NO_CUDA = "the kernels: the server runs on {device}, and a dry load selects kernels for CUDA"
_RUNNING = "the kernels and the quantization method: a running server does not state them"
_NO_MEMORY = "the size of the KV cache: vLLM {version} does not compute it in a dry load"
_NO_CACHE = "sequences in the KV cache: they do not follow from what the server states"
_EARLIER = "the starts of the server before line {line} of the log: the last start is compared"
_NOT_TAKEN = "arguments of the server that the dry load does not take: {names}"
_ENVIRONMENT = "environment variables of the server, because it does not state them"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTest:
    """A checkpoint, and the environment that loads it dry to judge a server's statements.

    `root` is the folder of the checkpoint `ref`. `serve` has the arguments with which the
    checkpoint was tested. They override the arguments of the log.
    """

    ref: SourceRef
    root: Path
    sm: Sequence[int] = ()
    gpus: Sequence[Card] = ()
    serve: Serve
    vllm_python: Path | None = None
    trust_remote_code: bool = False

    def report(self, log: StartupLog, on_progress: OnProgress) -> DryLoadReport:
        """Load the checkpoint dry as the log states, and return the report with all differences.

        The dry load is without arguments that choose a kernel, and for a host with a CUDA toolkit.
        If the log has other kernels, such an argument or a missing toolkit may explain them.

        Raises:
            Inconclusive: the log lacks the beginning of a start, its version of vLLM is not at
                hand, or vLLM's loaders cannot judge the checkpoint without a GPU.
            InputError: the log is of another model, or vLLM does not accept the arguments in
                `serve`.
            EngineFault: vLLM is missing, or dies.
        """
        require_beginning(log)
        self._require_version(log)
        require_same_model(log, self._names(log))
        require_arguments([self.serve], self.vllm_python, dry=True)
        capabilities = self._capabilities(log)
        dry = _DryLoads(self, log, capabilities, on_progress)
        report = dry.report({}, toolkit=True)
        if not report.log:
            return report
        own = _statements(report)
        identity = [*model_values(log, own), size_value(log, self._num_bytes)]
        require_same_model(log, identity)
        cache = [*_cache_values(log, own, report)]
        values = [*identity, *start_values(log, own), *cache]
        unjudged = _why_no_kernels(log, capabilities)
        unknown = "" if cache else _why_no_cache(log, report)
        earlier = _EARLIER.format(line=log.begin) if log.begin else ""
        spots = [
            *filter(None, (unjudged, earlier, dry.not_taken, unknown)),
            *late_selections(log, own),
        ]
        if not unjudged:
            unlogged = unlogged_kernels(own, report.rows, dry.forcing)
            selections, report = dry.explained(selection_values(log, own), report)
            values += selections
            spots += [*unlogged]
        report = _without_other_gpus(report, log, capabilities)
        errors = difference_findings(log, values)
        return replace(
            report,
            ok=report.ok and not errors,
            findings=(*report.findings, *errors, *remark_findings(log, own)),
            not_judged=(*report.not_judged, *gaps(log, values)),
            blind_spots=(*spots, _ENVIRONMENT, *report.blind_spots),
            server=ServerComparison(log=log.log, values=tuple(values)),
        )

    def _require_version(self, log: StartupLog) -> None:
        assert log.version is not None
        installed = installed_text(self.vllm_python)
        if installed and _release(installed) != _release(log.version.value):
            raise Inconclusive.of(
                rules.OTHER_VERSION,
                log.log,
                found=log.version.value,
                installed=installed,
            )

    def _names(self, log: StartupLog) -> Iterator[ComparedValue]:
        """Yield the name of the model on the hub, or the config of the folder, if both are known.

        A folder of the log exists on this machine only if the server runs here.
        """
        if log.model is None:
            return
        found, line = log.model.value, log.model.line
        own = self.ref.id if isinstance(self.ref, HubName) else _hub_name(str(self.root.resolve()))
        served = _hub_name(found)
        if not served and isinstance(self.ref, HubName) and (name := HubName.parse(found)):
            served = name.id
        if own and served and own.casefold() != served.casefold():
            yield ComparedValue(
                name="name", status="differs", server=served, dry_load=own, line=line
            )
        with suppress(InputError, OSError):
            if read_json_object(Path(found) / "config.json") != read_json_object(
                self.root / "config.json"
            ):
                place = str(self.root)
                yield ComparedValue(
                    name="folder", status="differs", server=found, dry_load=place, line=line
                )

    def _capabilities(self, log: StartupLog) -> tuple[int, ...]:
        wanted = tuple(self.sm) or tuple(dict.fromkeys(card.sm for card in self.gpus))
        if not wanted and log.gpu is not None and (card := find_card(log.gpu.value)):
            return (card.sm,)
        return wanted

    @property
    def _num_bytes(self) -> int:
        return sum(file.stat().st_size for file in weight_files(self.root))


class _DryLoads:
    """Dry loads of the checkpoint with the arguments of a log."""

    def __init__(
        self,
        test: ServerTest,
        log: StartupLog,
        capabilities: Sequence[int],
        on_progress: OnProgress,
    ) -> None:
        self._test, self._log, self._on_progress = test, log, on_progress
        self._capabilities = capabilities
        self._require: Require = "all" if capabilities else "any"
        taken, left = _dry_arguments(log.arguments, test)
        self._forcing = {
            name: value
            for name, value in taken.items()
            if _FORCING.search(name) and name not in test.serve.given
        }
        self._arguments = {
            name: value for name, value in taken.items() if name not in self._forcing
        }
        self.not_taken = _NOT_TAKEN.format(names=", ".join(left)) if left else ""

    def report(self, forcing: EngineArguments, *, toolkit: bool) -> DryLoadReport:
        """Load the checkpoint dry. Raise Inconclusive if vLLM's loaders cannot judge it."""
        test, size = self._test, self._log.tensor_parallel_size
        (report,) = DryLoad(
            checkpoints=[test.root],
            tp=(int(size.value) if size else 1,),
            sm=self._capabilities or CAPABILITIES,
            toolkits=(toolkit,),
            require=self._require,
            arguments={**self._arguments, **forcing, **test.serve.given},
            vllm_python=test.vllm_python,
            trust_remote_code=test.trust_remote_code,
            timeout=test.serve.timeout,
        ).reports(self._on_progress)
        uncertain = errors_or_uncertainty(report, self._require)
        if isinstance(uncertain, str):
            raise Inconclusive.of(rules.NO_DRY_LOAD, str(test.ref), reason=uncertain)
        python = str(test.vllm_python or "")
        return replace(report, checkpoint=str(test.ref), vllm_python=python)

    def explained(
        self, values: list[ComparedValue], report: DryLoadReport
    ) -> tuple[list[ComparedValue], DryLoadReport]:
        """Return the values with the reasons of differences, and the report.

        Known faults in the report are those of the kernels in the log, if a dry load has the same
        kernels.
        """
        for forcing, toolkit, reason in self._trials():
            unexplained = differing(value for value in values if not value.reason)
            if not unexplained:
                break
            trial = self.report(forcing, toolkit=toolkit)
            others = differing(selection_values(self._log, _statements(trial)))
            values = with_reason(values, unexplained - others, reason)
            if not others:
                return values, _with_faults_of(report, trial)
        return values, report

    @property
    def forcing(self) -> str:
        """The arguments of the log that choose a kernel, in words."""
        return ", ".join(f"{name}={value}" for name, value in self._forcing.items())

    def _trials(self) -> Iterator[tuple[EngineArguments, bool, str]]:
        because = f"because of {self.forcing} in the log"
        if self._forcing:
            yield self._forcing, True, because
        yield {}, False, _NO_TOOLKIT
        if self._forcing:
            yield self._forcing, False, f"{because}, and {_NO_TOOLKIT}"


def _statements(report: DryLoadReport) -> StartupLog:
    return read_startup_log(io.BytesIO("\n".join(report.log).encode()), report.checkpoint)


def _release(version: str) -> str:
    return version.partition("+")[0]


def _hub_name(path: str) -> str:
    """Return the model of the hub whose cache contains the path, or ""."""
    match = _CACHED.search(path)
    return f"{match['owner']}/{match['name']}" if match else ""


def _dry_arguments(
    given: Mapping[str, JsonValue], test: ServerTest
) -> tuple[dict[str, JsonValue], list[str]]:
    """Return the arguments of a log that a dry load takes, and the names of the others.

    A log is not trusted: text that could name code or files is left out, unless the user allows
    remote code. Arguments of the API server are ignored.
    """
    version = installed_version(test.vllm_python)
    known = argument_types(version)[ARGUMENTS]
    taken: dict[str, JsonValue] = {}
    left: list[str] = []
    for name, value in given.items():
        if name in _OWN or name not in known:
            continue
        is_code = not test.trust_remote_code and any(code_problems({name: value}, version))
        if is_code or name in (*NOT_DRY, "load_format") or not _is_allowed(name, value):
            left.append(name)
        else:
            taken[name] = value
    return taken, left


def _is_allowed(name: str, value: JsonValue) -> bool:
    try:
        Serve.model_validate({"engine_args": {name: value}})
    except ValidationError:
        return False
    return True


def _cache_values(
    log: StartupLog, own: StartupLog, report: DryLoadReport
) -> Iterator[ComparedValue]:
    sequences = report.memory[0].sequences if report.memory else ()
    lengths = {each.value for each in (log.max_model_len, own.max_model_len) if each is not None}
    if len(lengths) > 1 or "pipeline_parallel_size" in log.arguments:
        return
    if sequences and sequences[-1].kv_bytes:
        value = cache_value(log, sequences[-1].kv_bytes)
        if value is not None:
            yield value


def _why_no_cache(log: StartupLog, report: DryLoadReport) -> str:
    """Return why the size of the KV cache is not compared, or "" if the server states no size."""
    if not report.memory:
        return _NO_MEMORY.format(version=report.vllm)
    return _NO_CACHE if log.max_concurrency is not None else ""


def _why_no_kernels(log: StartupLog, capabilities: Sequence[int]) -> str:
    """Return why the kernels are not compared, or "" if they are."""
    if not log.lines:
        return _RUNNING
    if log.device is not None and log.device.value != _CUDA:
        return _NO_CUDA.format(device=log.device.value)
    if not capabilities:
        return _NO_GPU
    return _SEVERAL_GPUS if len(capabilities) > 1 else ""


def _without_other_gpus(
    report: DryLoadReport, log: StartupLog, capabilities: Sequence[int]
) -> DryLoadReport:
    """Return the report without findings on GPUs that the server may not have.

    If the server's GPU is unknown, a finding must be about every GPU of the dry load. A server on
    another device has none of them.
    """
    is_other_device = log.device is not None and log.device.value != _CUDA
    if capabilities and not is_other_device:
        return report
    tried = {cell.sm for cell in report.cells}
    findings = tuple(
        each
        for each in report.findings
        if not each.sm or (tried <= {*each.sm} and not is_other_device)
    )
    ok = all(each.severity != "error" for each in findings)
    return replace(report, ok=ok, findings=findings)


def _with_faults_of(report: DryLoadReport, running: DryLoadReport) -> DryLoadReport:
    """Return the report with the known faults of the kernels that run."""
    own = [each for each in report.findings if each.check != "faults"]
    known = [each for each in running.findings if each.check == "faults"]
    findings = (*own, *known)
    return replace(report, ok=all(each.severity != "error" for each in findings), findings=findings)
