"""The sides of a run: models to serve, or results to read in their place."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vexport.checkpoint.chat_template import chat_templates
from vexport.checkpoint.index import folder_digest
from vexport.checkpoint.source import resolve_source
from vexport.engine.installed import installed_text
from vexport.inference.endpoint.tokenizer import ServedTokenizer, tokenizer_of
from vexport.inference.options import BASELINE, CANDIDATE, EngineOptions
from vexport.inference.prompting import lm_eval_settings
from vexport.inference.response_sources import (
    DEFAULT_LM_EVAL,
    EndpointSource,
    EngineSource,
    ResponseSource,
)
from vexport.names import AcceptedFile, Folder, ModelRef, ResultFiles, Server
from vexport.run.checks import require_servable
from vexport.run.directory import Digests, value_digest
from vexport.scenario import Evaluate
from vexport.scenario.evaluate import LmEvalSettings
from vexport.scenario.serve import EngineArguments

_DIGEST_NAMES = {BASELINE: "baseline", CANDIDATE: "checkpoint"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A model to serve or results to read, and the folder of its responses.

    - `ref` is a server, a checkpoint that vLLM serves on this machine, or given results.
    - `name` is its name in the command or scenario, and `label` its name in progress and errors.
    - `folder` is the folder of its responses, below the run directory.
    - `part` distinguishes the side from others with its role in the directory's records.
    - `inputs` are digests of the model and of its engine.
    - `checkpoint` is the folder that vLLM serves on this machine, or None without one.
    - `tokenizer` makes the prompts for a server without a `checkpoint`.
    """

    role: str
    ref: ModelRef
    name: str
    label: str
    folder: str
    part: str = ""
    engine: EngineOptions
    arguments: EngineArguments = field(default_factory=dict)
    inputs: Digests = field(default_factory=dict)
    checkpoint: Path | None = None
    tokenizer: ServedTokenizer | None = None

    @property
    def is_served(self) -> bool:
        """Return True if the run must get responses from the model."""
        return not isinstance(self.ref, ResultFiles | AcceptedFile)

    @property
    def has_server_and_checkpoint(self) -> bool:
        """Return True if a server runs a checkpoint that vLLM can also serve on this machine."""
        return isinstance(self.ref, Server) and self.checkpoint is not None

    @property
    def prompt_folder(self) -> Path | None:
        """Return the folder with the tokenizer and chat template of the model's prompts."""
        return self.checkpoint or (self.tokenizer.folder if self.tokenizer is not None else None)

    def source(self, settings: Evaluate) -> ResponseSource:
        """Return the source of the responses to tasks or text."""
        if not isinstance(self.ref, Server):
            return self.engine_source
        url = self.ref.url
        tokenizer = self.tokenizer or tokenizer_of(
            self.role, url, settings, self.engine, self.checkpoint
        )
        return EndpointSource(
            role=self.label,
            url=url,
            tokenizer=tokenizer.folder,
            options=self.engine,
            trust_tokenizer=tokenizer.is_trusted,
        )

    @property
    def engine_source(self) -> EngineSource:
        """Return vLLM on this machine as the source of responses."""
        assert self.checkpoint is not None
        return EngineSource(
            role=self.label,
            checkpoint=self.checkpoint,
            options=self.engine,
            arguments=self.arguments,
        )


def find_side(
    role: str, ref: ModelRef, settings: Evaluate, options: EngineOptions, part: str = ""
) -> Side:
    """Find a model, and download it. Raises InputError if vLLM cannot serve it."""
    label = f"{role}/{part}" if part else role
    if isinstance(ref, Server):
        tokenizer = tokenizer_of(label, ref.url, settings, options)
        name = _DIGEST_NAMES[role]
        served = "" if tokenizer.model is None else repr(tokenizer.model)
        return Side(
            role=role,
            ref=ref,
            name=str(ref),
            label=label,
            folder=label,
            part=part,
            engine=options,
            tokenizer=tokenizer,
            inputs={
                **_engine_inputs(options),
                f"address of the {name}": value_digest([ref.url, str(tokenizer.folder)]),
                f"model at the address of the {name}": value_digest(served),
            },
        )
    if isinstance(ref, ResultFiles | AcceptedFile):
        return Side(
            role=role,
            ref=ref,
            name=str(ref),
            label=label,
            folder=label,
            part=part,
            engine=options,
        )
    checkpoint = resolve_source(ref, options.on_progress)
    require_servable(checkpoint, [options.serve])
    return local_side(
        role,
        checkpoint,
        options,
        name=str(ref),
        label=label,
        folder=label,
        part=part,
        is_unquantized=role == BASELINE,
    )


def local_side(
    role: str,
    checkpoint: Path,
    options: EngineOptions,
    *,
    name: str,
    label: str,
    folder: str,
    part: str = "",
    is_unquantized: bool = False,
) -> Side:
    """Return a checkpoint that vLLM serves on this machine.

    An unquantized baseline is served without the arguments that quantize the model.
    """
    return Side(
        role=role,
        ref=Folder.at(checkpoint),
        name=name,
        label=label,
        folder=folder,
        part=part,
        engine=options,
        arguments=options.serve.arguments(is_baseline=is_unquantized),
        checkpoint=checkpoint,
        inputs={**_engine_inputs(options), _DIGEST_NAMES[role]: folder_digest(checkpoint)},
    )


def _engine_inputs(options: EngineOptions) -> Digests:
    python = options.vllm_python
    return {
        "interpreter of vLLM": value_digest(str(python or "")),
        "version of vLLM": value_digest(installed_text(python)),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """How both sides are asked, chosen before a model runs.

    `templates` are the chat templates of the first model, or None if no template is applied.
    `texts` are texts for the models to continue, or empty for built-in texts.
    """

    lm_eval: LmEvalSettings = DEFAULT_LM_EVAL
    templates: Mapping[str, str] | None = None
    texts: tuple[str, ...] = ()


def prepare(
    settings: Evaluate, folders: Mapping[str, Path], texts: tuple[str, ...] = ()
) -> Preparation:
    """Choose the settings of lm-eval's prompts for both models.

    `folders` maps the role of each model to the folder of its tokenizer and chat template, the
    baseline first. Raises InputError if the same prompts cannot be used for both models.
    """
    if not settings.tasks:
        return Preparation(texts=texts)
    chosen = lm_eval_settings(settings, folders)
    first = next(iter(folders.values()), None) if chosen.apply_chat_template else None
    templates = chat_templates(first) if first is not None else None
    return Preparation(lm_eval=chosen, templates=templates, texts=texts)
