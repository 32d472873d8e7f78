"""Proves a quantized checkpoint before it takes its name: its config and names, and that vLLM loads it."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vexport.architectures.fusion import moe_layer
from vexport.checks import INTERNAL, findings_of_headers
from vexport.engine.dry.judge import errors_or_doubt
from vexport.engine.dry.load import CAPABILITIES, DryLoad
from vexport.engine.session import EngineFault
from vexport.errors import CheckpointFailed
from vexport.errors.extras import is_installed
from vexport.formats.schemes import get_scheme
from vexport.records import Finding, FusionGroup, OnProgress, Plan, silent

# Layers that are named one by one in advice; of more their projections are.
_FEW = 6
_NUMBERED = re.compile(r"[^.\s]+\.\d+\.\S+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The errors of a checkpoint, the patterns of layers to keep instead, and what was not judged."""

    errors: tuple[Finding, ...]
    keep: tuple[str, ...]
    not_judged: tuple[str, ...]

    def failure(self, folder: Path, out: Path, fix: str) -> CheckpointFailed:
        """The first error, of `out` instead of the `folder` in which it was written."""
        first, number = self.errors[0], len(self.errors)
        where = first.where if str(folder) in first.where else f"{out}: {first.where}"
        got = first.got + (f" ({number - 1:,} more)" if number > 1 else "")
        return CheckpointFailed(where.replace(str(folder), str(out)), got=got, need=first.expected, fix=fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prover:
    """Proves what was written by a plan before it becomes `out`: in this process its config, names, headers.

    With `dry` also by a dry load in vLLM, where it is installed: one GPU of those that run the schemes must
    load it for each `tp`, as attention and a quantized KV cache need more than schemes do. `note` is told
    what was not judged; `keeping` says how patterns of layers are kept instead.
    """

    out: Path
    note: Callable[[str], None]
    keeping: Callable[[Sequence[str]], str]
    tp: Sequence[int] = (1,)
    dry: bool = True
    trust_remote_code: bool = False
    on_progress: OnProgress = silent

    def failure(self, folder: Path, plan: Plan) -> CheckpointFailed | None:
        """The error of what is in `folder`, for which it is not to become `out`."""
        proof = self.prove(folder, plan)
        for text in proof.not_judged:
            self.note(text.replace(str(folder), str(self.out)))
        if not proof.errors:
            return None
        fix = f"keep it: {self.keeping(proof.keep)}" if proof.keep else "complete SOURCE, or report it"
        return proof.failure(folder, self.out, fix)

    def prove(self, folder: Path, plan: Plan) -> Proof:
        """Judge what is in `folder`; what cannot be judged is no error."""
        self.on_progress("prove (config and names)", 0, 1)
        findings = [each for each in findings_of_headers(folder) if each.severity == "error"]
        unsure = [f"{each.where}: {each.got}" for each in findings if each.check == INTERNAL]
        errors = [each for each in findings if each.check != INTERNAL]
        self.on_progress("prove (config and names)", 1, 1)
        if self.dry and not errors:
            judged = self._dry_loaded(folder, plan)
            errors += judged if not isinstance(judged, str) else ()
            unsure += [judged] if isinstance(judged, str) else ()
        keep = tuple(_patterns(list(_groups(plan, errors)))) if errors else ()
        return Proof(errors=tuple(errors), keep=keep, not_judged=tuple(unsure))

    def _dry_loaded(self, folder: Path, plan: Plan) -> list[Finding] | str:
        """The errors that vLLM's loaders find, or why they cannot tell."""
        if not is_installed("vllm"):
            return "vLLM is not installed, and has not loaded it; run `vexport load --dry` where it is"
        schemes = [get_scheme(name) for name in plan.schemes]
        supports = [scheme.format.gpu_support(scheme.args) for scheme in schemes]
        sm = tuple(
            sm for sm in CAPABILITIES if not any(each.package or each.refuses(sm) for each in supports)
        )
        if not sm:
            return "a dry load has no kernel for these schemes"
        trust = self.trust_remote_code
        load = DryLoad(checkpoints=[folder], tp=self.tp, sm=sm, require="any", trust_remote_code=trust)
        try:
            (report,) = load.reports(self.on_progress)
        except EngineFault as fault:
            return f"the dry load ended early: {fault.got}"
        return errors_or_doubt(report)


def _groups(plan: Plan, errors: Sequence[Finding]) -> Iterator[FusionGroup]:
    """The layers of the plan that findings name, by names of the files or by vLLM's."""
    named = {_tail(word) for each in errors for word in re.findall(r"[\w.]+", each.where)} - {""}
    for group in plan.groups:
        tails = {_tail(name) for name in (group.name, *(member.name for member in group.members))} - {""}
        if any(
            word == tail or word.startswith(f"{tail}.") or (moe_layer(tail) or tail) == word
            for tail in tails
            for word in named
        ):
            yield group


def _tail(name: str) -> str:
    """A layer's name from the one that numbers its decoder layer: `layers.0.mlp.down_proj`."""
    numbered = _NUMBERED.search(name)
    return numbered[0] if numbered else ""


def _patterns(groups: Sequence[FusionGroup]) -> Iterator[str]:
    """Patterns of --ignore that keep layers whole: all that are fused, and all experts of a layer."""
    names = [member.name for group in groups for member in group.members]
    experts = dict.fromkeys(layer for name in names if (layer := moe_layer(name)))
    singles = [name for name in names if moe_layer(name) is None]
    if len(experts) + len(singles) <= _FEW:
        yield from singles
        yield from (f"re:{re.escape(layer)}[.].*" for layer in experts)
        return
    leaves = dict.fromkeys(name.rpartition(".")[2] for name in singles)
    yield from (f"re:.*[.]{leaf}" for leaf in leaves)
    if experts:
        yield "re:.*[.]experts[.].*"
