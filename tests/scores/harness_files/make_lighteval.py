"""Write lighteval's details with lighteval's own classes.

Run it in an environment with lighteval 0.13: `python make_lighteval.py FOLDER`. It writes
`base` and `new`: 40 documents, 2 answers to each. `answers.py` has the scores.
"""
# mypy: ignore-errors

import sys
from pathlib import Path

from answers import DOCUMENTS, SEEDS, answer, score
from lighteval.logging.evaluation_tracker import EvaluationTracker
from lighteval.models.dummy.dummy_model import DummyModelConfig
from lighteval.models.model_output import ModelResponse
from lighteval.tasks.requests import Doc, SamplingMethod


def write(folder: Path, model: str) -> None:
    """Write one model's details."""
    tracker = EvaluationTracker(output_dir=str(folder), save_details=True)
    tracker.general_config_logger.log_model_info(DummyModelConfig(model_name=f"org/{model}"))
    for document in range(DOCUMENTS):
        for seed in range(SEEDS):
            doc = Doc(
                query=f"{document} + 1 =",
                choices=[str(document + 1)],
                gold_index=0,
                id=str(document),
                task_name="sums",
                sampling_methods=[SamplingMethod.GENERATIVE],
            )
            response = ModelResponse(input=doc.query, text=[answer(model, document, seed)])
            metrics = {"em": float(score(model, document, seed))}
            tracker.details_logger.log("sums|0", doc, response, metrics)
    tracker.details_logger.aggregate()
    tracker.save()


for name in ("base", "new"):
    write(Path(sys.argv[1]) / name, name)
