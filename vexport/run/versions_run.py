"""Run `vexport compare --versions`: one checkpoint in several versions of vLLM.

Each version loads the checkpoint dry. A version with a CPU build also reads text, whose
log-probabilities are compared with those of the baseline. The results of each version are stages
of the run directory, so a later call with the same inputs takes them again.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from vexport.architectures.versions import facts_of
from vexport.checkpoint.source import DEFAULT, not_served_here, resolve_source
from vexport.engine.agreement import kl_limit
from vexport.engine.dry.load import dry_load_checkpoints
from vexport.engine.environments import install_vllm
from vexport.engine.installed import installed_text
from vexport.errors import EnvironmentFault, InputError, VexportError
from vexport.errors.extras import attempt
from vexport.files import digest_bytes, to_json, write_text
from vexport.inference.options import CANDIDATE, EngineOptions
from vexport.judge.versions import (
    Answer,
    conclude,
    judge_alone,
    judge_change,
    search,
    text_findings,
)
from vexport.names import Server, SourceRef
from vexport.outputs.manifest import record
from vexport.outputs.replaceable import NamedPath, require_separate
from vexport.records import (
    PROGRESS_DETAIL,
    ComparedVariant,
    ComparedVersion,
    ComparedVersions,
    DryLoadReport,
    Finding,
)
from vexport.records.versions import BuildName
from vexport.reports import render_versions
from vexport.run.checks import require_servable
from vexport.run.directory import KIND, RUN_DIR, Digests, RunDirectory, opened, value_digest
from vexport.run.run import Run
from vexport.run.side import local_side
from vexport.run.stages.serving import serve_digest
from vexport.run.stages.variants import compare_variants
from vexport.run.work import Stage
from vexport.scenario import Evaluate, Variant
from vexport.scenario.variants import DEFAULT_SETTING
from vexport.version import Version, short_version

LOG = logging.getLogger(__name__)
VERSION_TEXT: Mapping[str, str | int] = {"text": DEFAULT, "text_rows": 64, "text_tokens": 128}
"""Settings of the text that CPU builds read: the text that ships with vexport, in short rows."""
VERSIONS = "versions.json"
# The forms of the report, by file.
_RENDERED = {"report.md": "markdown", "junit.xml": "junit", "report.html": "html"}
_CUDA = "the CUDA wheel only loads dry"
_CUDA_BASELINE = "the baseline is a CUDA wheel, which only loads dry"
_DIGITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionsJob:
    """What is compared: the versions with the interpreters that are known, and how.

    A version without an interpreter is installed when it is tried. None is vexport's interpreter.
    `text` has the settings of the text. `sm` are the compute capabilities of the dry load, or None
    for those of common GPUs.
    """

    versions: Sequence[Version]
    interpreters: dict[Version, Path | None]
    text: Evaluate
    sm: tuple[int, ...] | None = None
    bisect: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionsResult:
    """The report on all versions, and the faults of the environment."""

    report: ComparedVersions
    faults: tuple[VexportError, ...]


def compare_versions(
    checkpoint: SourceRef,
    job: VersionsJob,
    folder: Path,
    options: EngineOptions,
    *,
    overwrite: bool = False,
) -> VersionsResult:
    """Try a checkpoint in each version of vLLM, and find the first that refuses it or differs.

    `options.serve` has the arguments of vLLM. The results and the report are in the run directory
    `folder`. A version that cannot be tried is a row with the reason.

    Raises InputError for an unusable checkpoint, and if `folder` overlaps it.
    """
    outputs = [NamedPath(label=RUN_DIR, path=folder)]
    if isinstance(checkpoint, Server):
        raise not_served_here(checkpoint)
    require_separate(outputs, [NamedPath(label="CHECKPOINT", path=checkpoint.path)])
    KIND.require_own(folder)
    root = resolve_source(checkpoint, options.on_progress)
    require_servable(root, [options.serve])
    require_separate(outputs, [NamedPath(label="CHECKPOINT", path=root)])
    with opened(folder, overwrite=overwrite) as directory:
        trials = _Trials(directory, checkpoint, root, job, options)
        report = trials.report()
        record(folder / VERSIONS)
        write_text(folder / VERSIONS, to_json(report))
        for name, form in _RENDERED.items():
            record(folder / name)
            write_text(folder / name, render_versions(report, form))
    return VersionsResult(report=report, faults=tuple(trials.faults))


class _Trials:
    """The versions that have been tried in this call, with their results."""

    def __init__(
        self,
        directory: RunDirectory,
        checkpoint: SourceRef,
        root: Path,
        job: VersionsJob,
        options: EngineOptions,
    ) -> None:
        self.directory = directory
        self.checkpoint = checkpoint
        self.root = root
        self.job = job
        self.options = options
        self.faults: list[VexportError] = []
        self._pythons = dict(job.interpreters)
        self._loads: dict[Version, DryLoadReport | VexportError] = {}
        self._rows: dict[tuple[Version, Version], ComparedVersion] = {}

    def report(self) -> ComparedVersions:
        """Try the versions, and return the report."""
        versions = self.job.versions
        if self.job.bisect:
            search(len(versions), lambda number: self._is_like_first(versions[number]))
        else:
            for version in versions:
                self._load(version)
        rows = tuple(self._all_rows())
        outcome, reason, first = conclude(rows)
        return ComparedVersions(
            checkpoint=str(self.checkpoint),
            outcome=outcome,
            reason=reason,
            first=first,
            rows=rows,
        )

    def _is_like_first(self, version: Version) -> bool | None:
        """Return whether a version judges the checkpoint as the first version does.

        The first version is the first that can be judged. Return None if the version cannot be
        judged.
        """
        if self._alone(version).outcome == "NOT JUDGED":
            return None
        tried = (each for each in self.job.versions if each in self._loads)
        first = next(each for each in tried if self._alone(each).outcome != "NOT JUDGED")
        if self._alone(first).outcome == "REFUSED":
            return self._alone(version).outcome == "REFUSED"
        if version == first:
            return True
        return self._compared(first, version).outcome == "SAME"

    def _all_rows(self) -> list[ComparedVersion]:
        """Return a row for each version. The first version that loads it is the baseline."""
        rows: list[ComparedVersion] = []
        baseline: Version | None = None
        for version in self.job.versions:
            if version not in self._loads:
                name = facts_of(version).vllm
                rows.append(ComparedVersion(vllm=name, outcome="NOT TRIED"))
            elif baseline is None:
                answer = self._alone(version)
                rows.append(self._row(version, answer))
                baseline = version if answer.outcome == "BASELINE" else None
            else:
                rows.append(self._compared(baseline, version))
        return rows

    def _alone(self, version: Version) -> Answer:
        load = self._load(version)
        if isinstance(load, DryLoadReport):
            return judge_alone(load)
        return _answer_of(load)

    def _compared(self, baseline: Version, version: Version) -> ComparedVersion:
        if (baseline, version) not in self._rows:
            self._rows[baseline, version] = self._compare(baseline, version)
        return self._rows[baseline, version]

    def _compare(self, baseline: Version, version: Version) -> ComparedVersion:
        first, load = self._load(baseline), self._load(version)
        assert isinstance(first, DryLoadReport)
        if not isinstance(load, DryLoadReport):
            return self._row(version, _answer_of(load))
        if first.cuda or load.cuda or judge_alone(load).outcome != "BASELINE":
            why = "vLLM does not load it"
            if first.cuda or load.cuda:
                why = _CUDA_BASELINE if first.cuda else _CUDA
            return replace(self._row(version, judge_change(first, load)), kl_not_judged=why)
        text = self._text(baseline, version)
        if isinstance(text, str):
            return replace(self._row(version, judge_change(first, load)), kl_not_judged=text)
        findings: Sequence[Finding] = text_findings(text, first.vllm, self._limit)
        row = self._row(version, judge_change(first, load, findings))
        return replace(row, mean_kl=text.mean_kl, kl_limit=self._limit)

    def _row(self, version: Version, answer: Answer) -> ComparedVersion:
        load = self._load(version)
        name = self._name(version)
        build: BuildName = ""
        if isinstance(load, DryLoadReport):
            name, build = load.vllm, "cuda" if load.cuda else "cpu"
        return ComparedVersion(
            vllm=name,
            vllm_python=str(self._pythons.get(version) or ""),
            build=build,
            outcome=answer.outcome,
            reason=answer.reason,
            findings=answer.findings,
        )

    def _name(self, version: Version) -> str:
        is_there = version in self._pythons
        text = installed_text(self._pythons[version]) if is_there else ""
        return text or facts_of(version).vllm

    @cached_property
    def _limit(self) -> float:
        serve = self.options.serve
        return kl_limit(self.root, str(serve.given.get("kv_cache_dtype", "auto")))

    def _load(self, version: Version) -> DryLoadReport | VexportError:
        """Load the checkpoint dry in a version. Return the error if the version cannot be tried."""
        if version not in self._loads:
            number = len(self._loads)
            title = f"versions{PROGRESS_DETAIL}vLLM {short_version(version)}"
            self.options.on_progress(title, number, len(self.job.versions))
            found = attempt(partial(self._try, version), f"vLLM {short_version(version)}")
            self._loads[version] = found
            if isinstance(found, VexportError):
                self.faults += [] if isinstance(found, InputError) else [found]
                LOG.info("vLLM %s: %s", short_version(version), found)
        return self._loads[version]

    def _try(self, version: Version) -> DryLoadReport:
        if version not in self._pythons:
            name = facts_of(version).vllm
            self._pythons[version] = install_vllm(name, self.options.on_progress)
        python = self._pythons[version]
        options = replace(self.options, vllm_python=python)
        name = f"vllm-{self._name(version)}-{digest_bytes(str(python).encode())[:_DIGITS]}"
        side = local_side(
            CANDIDATE,
            self.root,
            options,
            name=str(self.checkpoint),
            label=name,
            folder=f"loads/{name}",
            part=name,
        )
        run = Run(self.directory, options, [side], name=name, evaluate=None)
        stage = _dry_load(self.checkpoint, self.job.sm)
        run.do(stage)
        return run.result(stage)

    def _text(self, baseline: Version, version: Version) -> ComparedVariant | str:
        """Compare the log-probabilities of two CPU builds. Return the reason if that fails."""
        first, other = self._pythons[baseline], self._pythons[version]
        options = replace(self.options, vllm_python=first)
        serve = options.serve
        variants = (
            Variant(setting=DEFAULT_SETTING, serve=serve, vllm_python=first),
            Variant(setting=DEFAULT_SETTING, serve=serve, vllm_python=other, has_other_vllm=True),
        )
        side = local_side(
            CANDIDATE,
            self.root,
            options,
            name=str(self.checkpoint),
            label=CANDIDATE,
            folder=CANDIDATE,
        )
        run = Run(
            self.directory,
            options,
            [side],
            name=self.checkpoint.title,
            evaluate=self.job.text,
            variants=variants,
        )
        try:
            run.do(compare_variants)
        except EnvironmentFault as fault:
            self.faults.append(fault)
            return str(fault)
        results = run.result(compare_variants)
        self.faults += results.faults
        row = results.rows[-1]
        if row.outcome in ("REFUSED", "NO ANSWER"):
            return f"the CPU build of vLLM {row.vllm} does not serve it: {row.reason}"
        return row


def _answer_of(error: VexportError) -> Answer:
    """Return the answer for a version that could not be tried.

    A version of vLLM that does not accept the arguments refuses the checkpoint as it is served.
    """
    return Answer("REFUSED" if isinstance(error, InputError) else "NOT JUDGED", str(error))


def _dry_load(checkpoint: SourceRef, sm: tuple[int, ...] | None) -> Stage[DryLoadReport]:
    def inputs(run: Run) -> Digests:
        side = run.candidate
        devices = value_digest([run.options.serve.ranks, list(sm or ())])
        return {**side.inputs, "`serve`": serve_digest(side.arguments), "devices": devices}

    @partial(Stage, "dry load", DryLoadReport, file="dry-load.json", place=CANDIDATE, digest=inputs)
    def load(run: Run) -> DryLoadReport:
        serve = run.options.serve
        (report,) = dry_load_checkpoints(
            [checkpoint],
            [run.options.vllm_python],
            tp=(serve.ranks,),
            sm=sm,
            trust_remote_code=run.options.trust_remote_code,
            serve=serve.model_copy(update={"tensor_parallel_size": None}),
            on_progress=run.options.on_progress,
        )
        return report

    return load
