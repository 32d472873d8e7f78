"""Named lists of lm-eval tasks, with margins and documents that show no loss with a power of 0.8 in each.

The documents are those of the tasks' own splits, of which `limit` takes the first. Tests hold the number of
every suite's task against the exact power of the test, at alpha 0.05 and 5 % of answers that change.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

SuiteName = Literal["quick", "standard", "code", "chat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteTask:
    """A task of lm-eval: its documents, and about how many tokens a document costs with its answers.

    `prompt_tokens` are read, those of all choices together; `new_tokens` are generated.
    """

    name: str
    documents: int
    prompt_tokens: int
    new_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Tasks, the loss that is accepted in each, and how many of their documents are asked at most.

    `apply_chat_template` is False where prompts are to be completed: humaneval ends an answer at the first
    `def`, which a turn of a chat begins with.
    """

    about: str
    tasks: tuple[SuiteTask, ...]
    margin: float
    limit: int | None = None
    apply_chat_template: bool | None = None

    def documents(self, task: SuiteTask) -> int:
        """The documents of a task that are asked."""
        return min(task.documents, self.limit or task.documents)


_ARC_EASY = SuiteTask(name="arc_easy", documents=2376, prompt_tokens=160)
_ARC = SuiteTask(name="arc_challenge", documents=1172, prompt_tokens=180)
_PIQA = SuiteTask(name="piqa", documents=1838, prompt_tokens=90)
_WINOGRANDE = SuiteTask(name="winogrande", documents=1267, prompt_tokens=60)
_HELLASWAG = SuiteTask(name="hellaswag", documents=10042, prompt_tokens=380)
_GSM8K = SuiteTask(name="gsm8k", documents=1319, prompt_tokens=900, new_tokens=150)
SUITES: Mapping[str, Suite] = {
    "quick": Suite(
        about="multiple choice, no generation",
        tasks=(_ARC_EASY, _PIQA, _WINOGRANDE),
        margin=0.02,
        limit=1000,
    ),
    "standard": Suite(
        about="multiple choice and mathematics",
        tasks=(_ARC, _HELLASWAG, _WINOGRANDE, _GSM8K),
        margin=0.02,
        limit=1319,
    ),
    "code": Suite(
        about="Python that is run: it needs --trust-remote-code",
        tasks=(
            SuiteTask(name="humaneval", documents=164, prompt_tokens=160, new_tokens=250),
            SuiteTask(name="mbpp", documents=500, prompt_tokens=700, new_tokens=150),
        ),
        margin=0.05,
        apply_chat_template=False,
    ),
    "chat": Suite(
        about="instructions, mathematics and truthfulness",
        tasks=(
            SuiteTask(name="ifeval", documents=541, prompt_tokens=60, new_tokens=400),
            _GSM8K,
            SuiteTask(name="truthfulqa_mc1", documents=817, prompt_tokens=400),
        ),
        margin=0.03,
    ),
}
