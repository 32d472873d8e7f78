"""`vexport run --until-pass`: what gets more bits after a FAIL, and what each round cost."""

from vexport.errors import InputError, raise_all
from vexport.reports.formatting import plural, size
from vexport.run.attempts import ATTEMPTS, read_attempts, set_aside
from vexport.run.choices import Choices
from vexport.scenario import Scenario
from vexport.sensitivity.promote import loss_of, next_promotions
from vexport.types import Attempt, Outcome, Plan, Report

# Five promotions leave a billionth of the predicted loss: what failed is then kept in 16 bits.
MOST_ROUNDS = 6


def require_promotable(scenario: Scenario) -> None:
    """InputErrors for a scenario of which nothing says that it passes, or what to promote."""
    needed = {
        "evaluate": (scenario.evaluate, "tasks, whose verdict says when to stop"),
        "calibration": (scenario.calibration, "samples that show which layers lose most"),
    }
    raise_all(
        [
            InputError(f"{scenario.name}: {key}", got="nothing", need=need, fix="add it for --until-pass")
            for key, (value, need) in needed.items()
            if value is None
        ]
    )


def promote(report: Report, choices: Choices) -> bool:
    """Set a round that failed on accuracy aside and begin the next; False where there is none."""
    attempts = read_attempts(choices.folder)
    number = len(attempts.failed) + 1
    if report.verdict is None or report.outcome != "FAIL" or number == MOST_ROUNDS:
        return False
    promotions = next_promotions(choices.sensitivity.groups, choices.schemes, number)
    if not promotions:
        return False
    price = sum(one.num_bytes for one in promotions)
    failed = attempt_of(choices, report.plan, report.outcome, report.reason, f"{ATTEMPTS}/{number}")
    set_aside(choices.stages.directory, failed, attempts, promotions)
    share = f"{100 * price / report.plan.output_bytes:.1f} %"
    note = (
        f"round {number + 1}: {plural(len(promotions), 'group')} promoted for {size(price)} more (+{share})"
    )
    choices.stages.options.on_progress(note, 1, 1)
    return True


def attempts_with(choices: Choices, plan: Plan, outcome: Outcome, reason: str) -> tuple[Attempt, ...]:
    """All rounds with this one, which ran in the run directory itself; none where there was but one."""
    failed = read_attempts(choices.folder).failed
    return (*failed, attempt_of(choices, plan, outcome, reason, ".")) if failed else ()


def attempt_of(choices: Choices, plan: Plan, outcome: Outcome, reason: str, folder: str) -> Attempt:
    """The round that runs, whose results are in `folder`."""
    attempts, schemes = read_attempts(choices.folder), choices.schemes
    return Attempt(
        number=len(attempts.failed) + 1,
        folder=folder,
        promotions=attempts.current,
        output_bytes=plan.output_bytes,
        loss=sum(loss_of(group, schemes[group.name]) for group in choices.sensitivity.groups),
        outcome=outcome,
        reason=reason,
    )
