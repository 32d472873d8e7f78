"""A model for tasks with metrics of a whole corpus, evaluated by the real lm-eval into folders."""

import random
import sys
from collections.abc import Sequence

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from tests.scores.adder import evaluate


class Translator(LM):  # type: ignore[misc]
    """Model with imperfect answers. On the documents `wrong`, it is worse than elsewhere."""

    def __init__(self, wrong: Sequence[int]) -> None:
        super().__init__()
        self.wrong = frozenset(wrong)

    def _noise(self, request: Instance) -> random.Random:
        return random.Random(f"{request.doc_id} {request.args[-1]}")

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Repeat the prompt's text with errors. More words are missing on wrong documents."""
        answers = []
        for request in requests:
            words = request.args[0].split(": ")[-1].split()
            kept = 0.4 if request.doc_id in self.wrong else 0.9
            noise = random.Random(request.doc_id)
            answers.append(" ".join(word for word in words if noise.random() < kept))
        return answers

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Prefer the option that the prompt ends with, except on wrong documents."""
        answers = []
        for request in requests:
            is_named = request.args[0].endswith(f"({request.args[1].strip()})")
            likes = is_named != (request.doc_id in self.wrong)
            noise = self._noise(request).gauss(0, 0.7)
            answers.append((noise - (0.5 if likes else 2.5), likes))
        return answers

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Lose a tenth of a nat for each word on wrong documents."""
        answers = []
        for request in requests:
            words = len(request.args[0].split())
            each = 3.0 + self._noise(request).gauss(0, 0.3)
            answers.append(-words * (each + 0.1 * (request.doc_id in self.wrong)))
        return answers


def main(arguments: list[str]) -> int:
    return evaluate(arguments, Translator)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
