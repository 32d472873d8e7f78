"""What two models' log-probabilities on the same tokens tell: early signals, and where a loss comes from."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDrift:
    """One token of a prompt under both models, in nats.

    `kl` is KL(baseline || candidate) over the whole vocabulary where this token was to be predicted;
    `baseline_nll` and `candidate_nll` are what the token itself cost each model.
    """

    token: str
    kl: float
    baseline_nll: float
    candidate_nll: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDrift:
    """One prompt: means over its tokens but the first, in nats, and the tokens themselves."""

    prompt: str
    kl: float
    baseline_nll: float
    candidate_nll: float
    tokens: tuple[TokenDrift, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Baseline against candidate, both in vLLM, on the same tokens; means over `positions`, in nats.

    `kl_limit` bounds `mean_kl`, `nll_limit` the rise of the mean NLL; beyond either is a warning and never
    decides. `top1_agreement` is the share of positions with the same likeliest token. `worst` are the
    prompts of largest KL, the worst first. Two drifts can be compared where `digest`, that of the token ids,
    is the same.
    """

    prompts: int
    positions: int
    mean_kl: float
    max_kl: float
    top1_agreement: float
    baseline_nll: float
    candidate_nll: float
    kl_limit: float
    nll_limit: float
    worst: tuple[PromptDrift, ...]
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """Mean and largest KL(`reference` || `measured`) in nats per token; `limit` bounds the mean."""

    reference: str
    measured: str
    mean_kl: float
    max_kl: float
    limit: float


Cause = Literal["none", "quantization", "loader", "kernel", "harness"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """The same tokens scored four ways, and the cause of a loss (`guilty` in JSON).

    (1) transformers and (2) vLLM on the baseline; (3) transformers with the exported weights dequantized and
    activations rounded, (4) vLLM on the candidate. `noise` is 2 against 1, `quantization` 3 against 1,
    `engine` 4 against 3, `total` 4 against 2. `harness`: what else differs between what the two models are
    asked. `evidence` has what speaks for the loader, in vLLM's or the check's words. Distances are None where
    the two models do not read the same tokens.
    """

    cause: Cause = field(metadata={"alias": "guilty"})
    reason: str
    noise: Distance | None
    quantization: Distance | None
    engine: Distance | None
    total: Distance | None
    harness: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
