"""Geometry of the charts, in per cent of the width: an SVG stretches and its text keeps its size."""
