"""Functions that plan from headers, in this process."""

from dataclasses import replace
from pathlib import Path

from vexport.api.arguments import Gpu, PlanArguments, SchemesArguments, with_keywords
from vexport.api.common import parsed
from vexport.architectures import resolve
from vexport.architectures.linears import names_of
from vexport.checkpoint.source import with_revision
from vexport.engine.installed import installed_version
from vexport.errors import InputError
from vexport.formats.gpus import find_card, parse_capabilities, parts_of
from vexport.formats.plan import Plan
from vexport.names import Server, SourceRef
from vexport.plan.build import PlanSettings
from vexport.plan.faults import plan_faults
from vexport.plan.recommend import table_for_gpu
from vexport.plan.source import (
    ignored_rules,
    plan_headers,
    require_trusted_scenario,
    rules_and_settings,
    scheme_table,
)
from vexport.quantize.auto import plan_scenario
from vexport.records import SchemeTable
from vexport.rules.usage import ONE_GPU
from vexport.scenario import Planning, is_scenario, read_scenario


def _plan(source: SourceRef, arguments: PlanArguments) -> Plan:
    """Plan from headers alone, as `vexport plan` does.

    Layers that vLLM would refuse raise no error. They are the plan's `refusals`.

    One of `scheme`, `recipe` and `rules` is required. `source` may also be the file of a scenario.
    The scenario then provides all settings. If it has `scheme: auto`, `run_dir` is the run
    directory in which `vexport run` measured each scheme's loss.
    """
    if is_scenario(str(source)) and not isinstance(source, Server):
        return _plan_of_scenario(source.path, arguments)
    rules, settings = rules_and_settings(
        arguments,
        arguments.rules,
        arguments.on_note,
        trust_remote_code=arguments.trust_remote_code,
    )
    sm = _capability("plan", arguments.gpu)
    index, plan = plan_headers(
        with_revision(source, arguments.revision),
        rules,
        replace(settings, has_text=arguments.has_text),
        arguments.on_progress,
        trust_remote_code=arguments.trust_remote_code,
    )
    if sm is None:
        return plan
    names = names_of(index, resolve(index.architecture, index.config)[0])
    return replace(plan, faults=tuple(plan_faults(plan.groups, names, sm, settings.ranks)))


def _capability(function: str, gpu: Gpu) -> int | None:
    """Return the compute capability of the GPU, or None without a GPU.

    Raises InputError if there are several.
    """
    if gpu is None:
        return None
    capabilities = parsed(f"{function}: gpu", parse_capabilities, gpu)
    if len(capabilities) != 1:
        raise InputError.of(ONE_GPU, f"{function}: gpu", count=len(capabilities))
    return capabilities[0]


def _plan_of_scenario(file: Path, arguments: PlanArguments) -> Plan:
    given = arguments.model_fields_set & {"rules", *Planning.model_fields}
    if given:
        raise ValueError(
            f"plan: got {', '.join(sorted(given))} next to {file}, need them in the scenario"
        )
    trusted = arguments.trust_remote_code
    scenario = read_scenario(file)
    require_trusted_scenario(scenario, file, trusted=trusted, vllm=installed_version())
    _, plan = plan_scenario(
        scenario, arguments.run_dir, arguments.on_progress, trust_remote_code=trusted
    )
    return plan


plan = with_keywords(PlanArguments, _plan)


def _plan_schemes(source: SourceRef, arguments: SchemesArguments) -> SchemeTable:
    """Compare all schemes, as `vexport plan` does without a scheme.

    With `gpu`, the table starts with the schemes that this GPU runs natively, and has
    recommendations.
    """
    gpu, sm = arguments.gpu, _capability("plan_schemes", arguments.gpu)
    settings = PlanSettings(ranks=arguments.tp, kv_cache=arguments.kv_cache)
    table = scheme_table(
        with_revision(source, arguments.revision),
        ignored_rules(arguments.ignore),
        settings,
        arguments.on_progress,
        arguments.group_size,
        sm,
    )
    if gpu is None or sm is None:
        return table
    card = next(filter(None, map(find_card, parts_of(gpu))), None)
    return table_for_gpu(table, sm, card)


plan_schemes = with_keywords(SchemesArguments, _plan_schemes)
