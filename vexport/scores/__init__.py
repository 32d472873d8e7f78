"""Read the scores of models into one table.

`table.py` has the table, `reading.py` finds the reader of a file or folder, and `readers/` has the
readers. `settings.py` compares the settings of two runs. `vexport.judge` decides by the scores.
"""
