"""Compute verdicts from the responses of models, and find the cause of a loss.

`vexport.inference` runs the models, and `vexport.scores` reads their responses into tables.
`pairs.py` pairs two tables, `task_verdict.py` compares the pair of each task by the formulas of
`statistics.py`, and `verdict.py` decides. For a text instead of tasks, `held_out.py` decides.
`drift.py` and `attribution.py` explain a loss, `load_judgement.py` judges a load, and
`accepting.py` stores a baseline.
"""
