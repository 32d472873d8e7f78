"""Stages of a run: make a checkpoint, load and serve it, compare variants, and conclude.

`order.py` lists the stages up to the verdict. `vexport/run/scenario_run.py` lists all stages.
"""
