"""How weights were rounded, as it is told."""

from dataclasses import replace

from tests.reports import sample
from vexport.records.rounding import GroupRounding, LayerRounding, RoundingReport
from vexport.reports import render
from vexport.reports.layers import fallback_findings, fallback_lines, rounding_lines

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
ROUNDING = RoundingReport(layers=(LayerRounding(groups=(QKV, LOST), state_error=0.02),))


def test_lines_say_how_strongly_and_what_it_gained() -> None:
    kinds, strength, gain = rounding_lines(ROUNDING)
    assert kinds == "refit of 1 group, nearest of 1 group"
    assert strength == "0.25 of the refit, ridge 0.1"
    weighed = RoundingReport(
        layers=(LayerRounding(groups=(replace(QKV, weighs_tokens=True),), state_error=0),)
    )
    assert [*rounding_lines(weighed)][1] == "0.25 of the refit, ridge 0.1, tokens weighed"
    assert gain == "output error 1.00% of the signal, 4.00% to nearest (median)"
    assert not [*rounding_lines(None)]


def test_a_fallback_is_a_warning_by_name() -> None:
    assert [*fallback_lines(ROUNDING)] == [f"{LOST.name} rounded to nearest: {LOST.fallback}"]
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
