"""Compute verdicts from the answers of models, and find the cause of a loss.

`vexport.inference` asks the models; nothing here does. `results.py` reads answers to tasks,
`pairs.py` pairs both models' answers, `statistics.py` and `compare.py` compare them, `verdict.py`
decides. `held_out.py` decides on a text instead. `drift.py` and `attribution.py` explain a loss,
`load_gate.py` judges a load, and `accepted.py` keeps a baseline.
"""
