"""The parts of a sample report that not every run has: signals, sensitivity, other devices."""

from vexport.records import (
    Attribution,
    Distance,
    Drift,
    DryLoadReport,
    GroupSensitivities,
    GroupSensitivity,
    MatrixCell,
    MatrixRow,
    MixedScheme,
    PromptDrift,
    SchemeChoice,
    SchemeLoss,
    TokenDrift,
)

DEVICES = tuple((tp, sm) for tp in (1, 2) for sm in (90, 100))
_LOSSES = {"mlp.down_proj": 0.021, "self_attn.qkv_proj": 0.0041, "mlp.gate_up_proj": 0.009}


def drift(prompt: str = "47 + 85 = 2 3 1") -> Drift:
    """A KL beyond its limit, an NLL within."""
    tokens = tuple(
        TokenDrift(token=word, kl=kl, baseline_nll=0.01, candidate_nll=0.2)
        for word, kl in zip(prompt.split(" "), (0.0, 0.02, 0.4, 3.0, 40.0), strict=False)
    )
    worst = PromptDrift(prompt=prompt, kl=0.31, baseline_nll=0.02, candidate_nll=0.4, tokens=tokens)
    return Drift(
        prompts=16,
        positions=1936,
        mean_kl=0.06,
        max_kl=3.1,
        top1_agreement=0.981,
        baseline_nll=0.71,
        candidate_nll=0.74,
        kl_limit=0.05,
        nll_limit=0.05,
        worst=(worst,),
    )


def attribution(words: str = "the chat template is another") -> Attribution:
    """A loss that quantization explains."""

    def distance(reference: str, measured: str, mean: float) -> Distance:
        return Distance(reference=reference, measured=measured, mean_kl=mean, max_kl=9 * mean, limit=0.02)

    return Attribution(
        cause="quantization",
        reason="KL 0.058 between the weights in transformers, 0.0006 in the engine",
        noise=distance("transformers", "vLLM", 0.0002),
        quantization=distance("transformers", "transformers, dequantized", 0.058),
        engine=distance("transformers, dequantized", "vLLM, quantized", 0.0006),
        total=None,
        harness=(words,),
    )


def sensitivity(layers: int = 3) -> GroupSensitivities:
    """Two schemes for three groups of every block."""
    groups = tuple(
        GroupSensitivity(
            name=f"model.layers.{index}.{kind}",
            layers=(f"model.layers.{index}.{kind}",),
            parameters=131_072,
            source_bytes=262_144,
            schemes=(
                SchemeLoss(
                    scheme="NVFP4", observer="memoryless_mse", num_bytes=73_728, loss=loss / (index + 1)
                ),
                SchemeLoss(
                    scheme="FP8_DYNAMIC",
                    observer="memoryless_minmax",
                    num_bytes=131_200,
                    loss=loss / (20 * (index + 1)),
                ),
            ),
        )
        for index in range(layers)
        for kind, loss in _LOSSES.items()
    )
    return GroupSensitivities(samples=16, tokens=2048, groups=groups)


def mixed() -> MixedScheme:
    """FP8 where it hurts most."""
    choices = tuple(
        SchemeChoice(
            name=group.name,
            scheme="FP8_DYNAMIC" if "down" in group.name else "NVFP4",
            num_bytes=73_728,
            loss=0.001,
        )
        for group in sensitivity().groups
    )
    return MixedScheme(
        budget="bits",
        limit=5.0,
        candidates=("NVFP4", "FP8_DYNAMIC", "keep"),
        output_bytes=900_000,
        loss=0.0089,
        choices=choices,
    )


def dry_load(name: str = "model.layers.*.mlp.down_proj") -> DryLoadReport:
    """Loads on two capabilities, at another precision on one."""
    cells = tuple(
        MatrixCell(
            tp=tp,
            sm=sm,
            status="loads" if sm == 100 else "other precision",
            precision="W4A4" if sm == 100 else "W4A16",
            kernel="FlashInferNvFp4LinearKernel" if sm == 100 else "MarlinNvFp4LinearKernel",
        )
        for tp, sm in DEVICES
    )
    whole = tuple(MatrixCell(tp=cell.tp, sm=cell.sm, status=cell.status) for cell in cells)
    return DryLoadReport(
        checkpoint="runs/demo-nvfp4/checkpoint",
        ok=True,
        findings=(),
        vllm="0.32.0",
        cells=whole,
        rows=(MatrixRow(name=name, count=3, scheme="NVFP4", stored="W4A4", cells=cells),),
        blind_spots=("no kernel ran",),
    )
