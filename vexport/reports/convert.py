"""What a conversion did, for people: how many layers dequantize to the same values, or what kept it."""

from vexport.files import to_json
from vexport.repair.convert import ConvertReport
from vexport.reports import document as doc
from vexport.reports import text
from vexport.reports.document import parts
from vexport.reports.formatting import plural


def render_convert(report: ConvertReport, format_: str) -> str:
    """The report as text or JSON, with a final newline."""
    return to_json(report) if format_ == "json" else text.render([_document(report)])


def _document(report: ConvertReport) -> doc.Document:
    rows = tuple((report.checkpoint, finding) for finding in report.findings)
    found = doc.Section("Findings", (doc.FindingList(rows, "--format json"),)) if rows else None
    return doc.Document(
        title=report.checkpoint, parts=parts(found, doc.Paragraph(_conclusion(report))), wide=True
    )


def _conclusion(report: ConvertReport) -> str:
    if not report.ok:
        return f"{report.checkpoint}: nothing written"
    last_bit = report.layers - report.exact
    rest = (
        f", {last_bit} but for the last bit of some weights (global scales are stored as reciprocals)"
        if last_bit
        else ""
    )
    layers = plural(report.layers, "layer")
    return f"{report.out}: {layers} of {report.method} converted, {report.exact} bit for bit{rest}"
