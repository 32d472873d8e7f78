"""Render a document as one self-contained HTML page without scripts or links to the network.

The page has a light and a dark style, and fits screens with a width of 400 px and more.
"""

import re

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from vexport.errors import visible
from vexport.reports.document import Document, FindingList, Part, Section, Table, finding_parts
from vexport.reports.formatting import capitalized, sentence, task_title
from vexport.words import clip

MAX_FINDINGS = 200
MAX_TEXT = 2000
_CODE = re.compile(r"`([^`\n]+)`")


def render(document: Document) -> str:
    """Return the page. Equal documents give equal bytes, and every value is escaped."""
    sections = [
        part for part in document.parts if isinstance(part, Section) and "html" in part.forms
    ]
    failed = [gate for gate in document.gates if gate.findings and gate.status == "FAIL"]
    context = {
        "document": document,
        "contents": [(section.anchor, section.title) for section in sections if section.anchor],
        "sentence": capitalized(document.sentence),
        "next_sentence": sentence(document.next_step[1]),
        "problems": [gate for gate in failed if gate.message not in document.sentence],
    }
    return _environment().get_template("page.html").render(context)


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("vexport.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )

    def draw(part: Part) -> Markup:
        """Call the macro of parts.html with the name of the part's type in lower case."""
        if isinstance(part, FindingList):
            return Markup("").join(map(draw, finding_parts(part, MAX_FINDINGS)))
        if isinstance(part, Table):
            part = part.shown("html")
        macros = environment.get_template("parts.html").module
        return Markup(getattr(macros, type(part).__name__.lower())(part))

    environment.globals.update(
        draw=draw,
        clip=lambda text, limit=MAX_TEXT: clip(text, limit),
        prose=_with_code,
        task_title=task_title,
    )
    return environment


def _with_code(text: str, limit: int = MAX_TEXT) -> Markup:
    """Return a clipped sentence of a report, escaped, with `code` in backticks as <code>.

    Prompts, responses and names keep their backticks: the templates show them with `clip`.
    """
    escaped = str(escape(visible(clip(text, limit), keep="\n\t")))
    return Markup(_CODE.sub(r"<code>\1</code>", escaped))


def _finalize(value: object) -> object:
    """Make control characters of a string visible before the string is escaped.

    Markup is returned unchanged, because its text was converted before.
    """
    return (
        visible(value, keep="\n\t")
        if isinstance(value, str) and not isinstance(value, Markup)
        else value
    )
