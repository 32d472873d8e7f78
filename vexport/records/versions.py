"""Records of `vexport compare --versions`: one checkpoint in several versions of vLLM."""

from dataclasses import dataclass
from typing import Literal

from vexport.records.findings import Finding
from vexport.records.values import Outcome

# Result of a version. BASELINE: the first version that loads the checkpoint. REFUSED: vLLM refuses
# the checkpoint, or the first versions load it wrongly. DIFFERS: it loads in another way than in
# the baseline. NOT TRIED: --bisect did not need the version.
VersionOutcome = Literal["BASELINE", "SAME", "DIFFERS", "REFUSED", "NOT JUDGED", "NOT TRIED"]
# vLLM's build in an environment, empty if it is unknown.
BuildName = Literal["cpu", "cuda", ""]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedVersion:
    """A row of `vexport compare --versions`: a version of vLLM, compared with the baseline.

    `vllm_python` is the interpreter, empty for vexport's interpreter. `findings` are the changes
    since the baseline. For the baseline, they are its warnings. Before the baseline, they are the
    errors. `mean_kl` is the divergence from the baseline in nats per token, and `kl_limit` the
    largest value that the order of roundings explains. Both are None if the KL was not measured.
    `kl_not_judged` is then the reason.
    """

    vllm: str
    vllm_python: str = ""
    build: BuildName = ""
    outcome: VersionOutcome
    reason: str = ""
    findings: tuple[Finding, ...] = ()
    mean_kl: float | None = None
    kl_limit: float | None = None
    kl_not_judged: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedVersions:
    """A checkpoint in several versions of vLLM.

    `first` is the first version that refuses the checkpoint or differs from the baseline, or that
    loads the checkpoint if the versions before it do not. It is empty if there is no such version.
    """

    schema: Literal["vexport.compare-versions/1"] = "vexport.compare-versions/1"
    checkpoint: str
    outcome: Outcome
    reason: str
    first: str = ""
    rows: tuple[ComparedVersion, ...]
