"""Tests of shipped tasks."""
