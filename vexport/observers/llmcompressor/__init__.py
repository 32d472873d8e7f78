"""Observers of other people: classes and scripts that follow llm-compressor's documents.

`observer.py` adds the documented methods to vexport's observers, and calls the methods that a
subclass overrides. `classes.py` has vexport's observers with these methods.
"""
