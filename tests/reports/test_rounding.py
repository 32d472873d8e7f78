"""How weights were rounded, as it is told."""

from dataclasses import replace

from tests.reports import sample
from vexport.reports import render
from vexport.reports.rounding import fallback_findings, fallback_lines, rounding_lines
from vexport.types.rounding import GroupRounding, LayerRounding, RoundingReport, Strength

GPTQ = Strength(strength=0.0, ridge=0.01, divergence=0.25)
REFIT = Strength(strength=0.25, ridge=0.1, divergence=0.125)
QKV = GroupRounding(
    name="model.layers.0.self_attn.qkv_proj",
    rounding="refit",
    strength=0.25,
    damping=0.1,
    tokens=1024,
    columns=256,
    nearest_error=0.04,
    error=0.01,
)
LOST = GroupRounding(name="model.layers.0.mlp.down_proj", fallback="H is not positive definite")
ROUNDING = RoundingReport(
    chosen=REFIT, tried=(GPTQ, REFIT), layers=(LayerRounding(groups=(QKV, LOST), state_error=0.02),)
)


def test_lines_say_what_was_chosen_by_what_and_what_it_gained() -> None:
    kinds, chosen, gain = rounding_lines(ROUNDING)
    assert kinds == "refit of 1 group, nearest of 1 group"
    assert chosen == (
        "0.25 of the refit, ridge 0.1 (KL 0.125 on rows held out); "
        "also tried: no refit, ridge 0.01 (KL 0.25 on rows held out)"
    )
    weighed = replace(ROUNDING, chosen=replace(REFIT, weighs_tokens=True))
    assert "0.25 of the refit, ridge 0.1, tokens weighed (KL 0.125" in rounding_lines(weighed)[1]
    assert gain == "output error 1.00% of the signal, 4.00% to nearest (median)"
    assert rounding_lines(None) == ()


def test_a_fallback_is_a_warning_by_name() -> None:
    assert fallback_lines(ROUNDING) == (f"{LOST.name} rounded to nearest: {LOST.fallback}",)
    (finding,) = fallback_findings(ROUNDING)
    assert (finding.check, finding.severity, finding.where) == ("rounding", "warning", LOST.name)
    assert "H is not positive definite" in finding.got


def test_page_and_card_say_which_layer_got_what() -> None:
    report = replace(sample.report(), rounding=ROUNDING)
    page, card, text = (render(report, format_) for format_ in ("html", "card", "text"))
    for words in (QKV.name, "4.0%", "2.0%", LOST.fallback or ""):
        assert words in page
    assert "refit of 1 group, nearest of 1 group" in card
    assert "rounded to nearest: H is not positive definite" in card
    assert "0.25 of the refit, ridge 0.1" in text
