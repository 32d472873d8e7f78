"""`vexport explain`: what a name means, from the reference pages and the tables of schemes and observers."""

from vexport.explain.entries import KEY, Entry, explain, facts_of
from vexport.explain.pages import Section, all_sections, find_section, topic_names
from vexport.explain.render import render_entry, render_topics

__all__ = [
    "KEY",
    "Entry",
    "Section",
    "all_sections",
    "explain",
    "facts_of",
    "find_section",
    "render_entry",
    "render_topics",
    "topic_names",
]
