"""Read responses to tasks and their scores.

`results.py` reads the folders of lm-eval, and `harnesses.py` the files of other harnesses.
`settings.py` compares the settings of two runs. `vexport.judge` decides by the scores.
"""
