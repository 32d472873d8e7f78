"""Renderers of documents: text, HTML, Markdown, JUnit XML and GitHub annotations."""
