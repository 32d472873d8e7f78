"""Readers of result files. Each returns the `TaskTable`s or the `ScoreTable` of one format."""
