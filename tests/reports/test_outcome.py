"""A run's outcome and its sentence: the first stage that failed decides."""

from dataclasses import replace

import pytest

from tests.reports import parts, sample
from vexport.records import CheckReport
from vexport.reports import render
from vexport.run.concluding import NOT_RUN, conclude

GOOD = CheckReport(checkpoint="c", ok=True, findings=(sample.finding(),))


def test_without_an_evaluation_the_sentence_says_so() -> None:
    outcome, reason = conclude(GOOD, parts.dry_load(), sample.load(), None)
    assert outcome == "PASS"
    assert "accuracy was not evaluated" in reason
    text = render(replace(sample.report(), verdict=None, reason=reason), "text")
    assert text.startswith(
        "PASS on CPU, emulated  demo-nvfp4\nCheck and load found no error; accuracy was not"
    )


@pytest.mark.parametrize("stage", ["check", "load"])
def test_a_stage_that_failed_is_named_with_its_first_error_and_their_number(stage: str) -> None:
    errors = (sample.finding(), sample.finding("error"), sample.finding("error", where="lm_head"))
    check = CheckReport(checkpoint="c", ok=False, findings=errors) if stage == "check" else GOOD
    failed = replace(sample.load(), ok=False, findings=errors)
    loaded = NOT_RUN if stage == "check" else failed
    outcome, reason = conclude(check, None, loaded, None)
    assert outcome == "FAIL"
    assert reason.startswith(f"{stage}: model.layers.2.mlp.down_proj: ")
    assert "1 more error" in reason
    report = replace(sample.unloaded(), reason=reason, check=check, load=loaded)
    text = render(report, "text")
    assert text.startswith("FAIL  demo" if stage == "check" else "FAIL on CPU, emulated  demo")
    assert "% of the size." not in text


def test_the_verdict_decides_where_every_stage_passed() -> None:
    judged = sample.verdict("INCONCLUSIVE")
    assert conclude(GOOD, None, sample.load(), judged) == ("INCONCLUSIVE", judged.reason)
