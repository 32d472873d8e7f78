"""Recognize weights written by vexport's `gptq` or `refit`, in which large changes are not faults.

With little calibration text, or if an input channel is very large, these roundings make whole parts
of a weight larger or smaller. In a checkpoint of another producer such a change would be a wrong
scale.
vexport records the digests of the files that it writes. If the digests match, the files contain
exactly the values that the rounding computed.
"""

from collections.abc import Mapping

from pydantic import ValidationError

from vexport.checkpoint.index import SourceIndex, headers_digest
from vexport.checks.vllm.view import CheckpointView
from vexport.errors import InputError
from vexport.files import read_json_object
from vexport.formats.schemes import KEEP
from vexport.outputs import RECIPE
from vexport.outputs.digests import HEADERS, HEADERS_DIGEST, REPAIRED, digest_of, recorded_digests
from vexport.plan.rules import default_rounding
from vexport.records import Json
from vexport.records.calibration import ROUNDINGS
from vexport.scenario.rules import AUTO, Rule

# Roundings that correct a weight for its inputs.
CORRECTING = frozenset(ROUNDINGS) - {"nearest"}


def is_rounded_by_vexport(view: CheckpointView, source: SourceIndex) -> bool:
    """Return True if vexport rounded these weights of this source with calibration inputs.

    Four conditions must hold. The files have the digests in vexport.json. The recipe has
    calibration text and a rule with `gptq` or `refit`. The source has the recorded config and
    headers. The checkpoint was not repaired afterwards.
    """
    root = view.index.root
    try:
        recipe = read_json_object(root / RECIPE)
        digests = recorded_digests(root)
    except (InputError, OSError):
        return False
    if recipe.get(REPAIRED) or not _has_correcting_rule(recipe) or not _is_recorded(recipe, source):
        return False
    tensors = view.index.tensors.values()
    if not all(view.reader.is_in_place(tensor) for tensor in tensors):
        return False
    files = {tensor.file for tensor in tensors}
    return all(digests.get(file.name) == digest_of(file) for file in sorted(files))


def _has_correcting_rule(recipe: Mapping[str, Json]) -> bool:
    scenario = recipe.get("scenario")
    if not isinstance(scenario, dict) or not isinstance(scenario.get("calibration"), dict):
        return False
    rules = scenario.get("rules")
    return isinstance(rules, list) and any(_is_correcting(rule) for rule in rules)


def _is_correcting(recorded: Json) -> bool:
    """Return True if a recorded rule rounds weights with `gptq` or `refit`.

    The rule may name the rounding, or it may be the default of the rule's scheme.
    """
    try:
        rule = Rule.model_validate(recorded)
    except ValidationError:
        return False
    if rule.method is not None:
        return rule.method in CORRECTING
    return (
        rule.scheme not in (KEEP, AUTO)
        and default_rounding(rule.scheme, has_text=True) in CORRECTING
    )


def _is_recorded(recipe: Mapping[str, Json], source: SourceIndex) -> bool:
    headers = recipe.get(HEADERS)
    return isinstance(headers, dict) and headers.get(HEADERS_DIGEST) == headers_digest(source)
