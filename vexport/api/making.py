"""The function that quantizes."""

from collections.abc import Sequence
from pathlib import Path

from vexport.api.arguments import QuantizeArguments, with_keywords
from vexport.api.common import Name, is_verifying
from vexport.checkpoint.source import with_revision
from vexport.engine.loader_check import LoadVerifier
from vexport.names import SourceRef
from vexport.plan.source import rules_and_settings, with_calibration_text
from vexport.quantize.job import QuantizeJob, quantize_source
from vexport.quantize.result import quantized_result
from vexport.records import Quantized
from vexport.scenario import Calibration, problems_at


def _quantize(source: SourceRef, out: Name, arguments: QuantizeArguments) -> Quantized:
    """Quantize a folder or a model of the hub into the folder `out`, as `vexport quantize` does.

    `scheme` applies to all linear layers except the layers in `ignore`. `rules` choose a scheme
    layer by layer, and `recipe` is a file of llm-compressor. Without `calibration`, a scheme that
    needs samples uses the text that ships with vexport.

    The checkpoint is checked before it becomes `out`. If vLLM is installed, and VEXPORT_NO_VERIFY
    is not set, `verify` adds a dry load. A checkpoint that fails becomes OUT.failed, and
    CheckpointFailed is raised.
    """
    rules, settings = rules_and_settings(
        arguments,
        arguments.rules,
        arguments.on_note,
        trust_remote_code=arguments.trust_remote_code,
    )
    notes: list[str] = []
    text = arguments.calibration
    if text is not None and not isinstance(text, Calibration):
        with problems_at("calibration"):
            text = Calibration.model_validate({"data": text})
    rules, settings, text = with_calibration_text(
        rules, settings, text, arguments.default_calibration, notes.append
    )

    def show_notes() -> None:
        for note in notes:
            arguments.on_note(note)

    def keywords_that_keep(patterns: Sequence[str]) -> str:
        return f"ignore={[*arguments.ignore, *patterns]}"

    job = QuantizeJob(
        source=with_revision(source, arguments.revision),
        out=Path(out),
        rules=rules,
        planning=settings,
        calibration=text,
        overwrite=arguments.overwrite,
        trust_remote_code=arguments.trust_remote_code,
        shard_bytes=arguments.max_shard_size,
        prove=LoadVerifier(
            note=arguments.on_note,
            command_that_keeps=arguments.how_to_keep or keywords_that_keep,
            dry=arguments.verify and is_verifying(),
        ).failure,
        on_progress=arguments.on_progress,
    )
    return quantized_result(str(out), *quantize_source(job, show_notes))


quantize = with_keywords(QuantizeArguments, _quantize)
