"""Run the stages of making and judging a checkpoint, in a run directory.

`stages/` has the stages. `scenario_run.py`, `eval_run.py`, `load_run.py` and `variants_run.py` are
the runs of the commands `run`, `eval`, `load` and `compare --serve`.
"""
