"""Renderers of a document: terminal text, HTML, Markdown, and the forms of CI systems."""
