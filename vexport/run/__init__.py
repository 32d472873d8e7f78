"""Make a checkpoint and judge it, in a run directory.

A `Run` (`run.py`) has one or two sides (`side.py`): a model to serve, or results to read in its
place. Its stages get the responses, compare them and write one report. A scenario makes the
checkpoint first (`Maker` in `stages/making.py`). `work.py` does stages and skips the finished ones,
with the records in `directory.py`. `scenario_run.py`, `eval_run.py`, `load_run.py` and
`variants_run.py` check the inputs of the commands `run`, `eval`, `load` and `compare --serve`, and
build their runs.
"""
