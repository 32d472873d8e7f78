"""Write EvalScope's reviews with EvalScope's own classes.

Run it in an environment with EvalScope 1.14: `python make_evalscope.py FOLDER`. It writes
`base` and `new`: 40 documents, 2 answers to each. `answers.py` has the scores.
"""
# mypy: ignore-errors

import sys
from pathlib import Path

from answers import DOCUMENTS, SEEDS, answer, score
from evalscope.api.dataset import Sample
from evalscope.api.evaluator import CacheManager, TaskState
from evalscope.api.messages import ChatMessageUser
from evalscope.api.metric import SampleScore, Score
from evalscope.api.model import ModelOutput
from evalscope.utils.io_utils import OutputsStructure


def write(folder: Path, model: str) -> None:
    """Write one model's reviews."""
    cache = CacheManager(OutputsStructure(str(folder)), model, "sums")
    for document in range(DOCUMENTS):
        for seed in range(SEEDS):
            number = document * SEEDS + seed
            text = answer(model, document, seed)
            sample = Sample(input=f"{document} + 1 =", target=str(document + 1), id=number)
            state = TaskState(
                model=model,
                sample=sample,
                messages=[ChatMessageUser(content=f"{document} + 1 =")],
                output=ModelOutput.from_content(model=model, content=text),
                completed=True,
            )
            value = Score(
                value={"acc": float(score(model, document, seed))},
                prediction=text,
                extracted_prediction=text,
            )
            scored = SampleScore(
                score=value, sample_id=number, group_id=document, generation_index=seed
            )
            cache.save_review_cache("default", state, scored)
    cache.close()


for name in ("base", "new"):
    write(Path(sys.argv[1]) / name, name)
