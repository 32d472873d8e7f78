"""Answers of two models, which every harness's files record: 3 are lost and 1 is won."""

DOCUMENTS = 40
SEEDS = 2
LOST = {(4, 0), (17, 1), (30, 0)}
WON = {(9, 1)}
WRONG = {(9, 0), (9, 1), (21, 0), (35, 1)}


def score(model: str, document: int, seed: int) -> int:
    """Return 1 if the model answers right."""
    where = document, seed
    is_wrong = where in WRONG
    if model == "new":
        is_wrong = where in (WRONG - WON) | LOST
    return int(not is_wrong)


def answer(model: str, document: int, seed: int) -> str:
    """Return the text of the answer."""
    return str(document + 2 - score(model, document, seed))
