"""The layout of help: options in sections, commands in the order of work, lines that fit the terminal."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

import click

WIDEST = 100
OTHERS = "Options"
# The sections in their order; an option that none of them names stands under "Options".
SECTIONS: Mapping[str, Sequence[str]] = {
    title: names.split()
    for title, names in (
        (
            "Scheme",
            "scheme recipe observer input_observer rounding group_size ignore kv_cache "
            "on_unsupported_shape smoothing revision",
        ),
        ("Comparison", "baseline against accept source"),
        ("Calibration", "calibration samples seq_len seed pack all_experts device"),
        ("Tasks", "tasks text text_rows text_tokens include_path limit batch_size"),
        (
            "Prompts",
            "apply_chat_template chat_template system_instruction num_fewshot "
            "fewshot_as_multiturn gen_kwargs seeds max_gen_toks think_end_token enable_thinking",
        ),
        ("Verdict", "margin alpha gate kl_limit nll_limit attribution attribution_seconds"),
        (
            "vLLM",
            "tp sm cards vllm dry static strict speculative mode vllm_python max_model_len "
            "max_num_seqs gpu_memory_utilization dtype engine_args timeout trust_remote_code",
        ),
        ("Servers", "tokenizer model baseline_model concurrency request_timeout retry_seconds"),
        (OTHERS, ""),
        (
            "Output",
            "format_ answer_file every output_dir run_dir max_shard_size overwrite quiet verbose debug help",
        ),
    )
}
_SECTION_OF = {name: title for title, names in SECTIONS.items() for name in names}


class SectionedCommand(click.Command):
    """A command whose options stand in the sections of `SECTIONS`."""

    def invoke(self, ctx: click.Context) -> object:
        """Call the command; a parameter whose type is a dataclass takes the options named as its fields."""
        assert self.callback is not None
        return ctx.invoke(self.callback, **grouped(self.callback, ctx.params))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Every section that has options, in the order of `SECTIONS`."""
        write_sections(self.get_params(ctx), ctx, formatter)


def grouped(function: Callable[..., object], values: Mapping[str, object]) -> dict[str, object]:
    """The arguments of a command's function from the values of its options and arguments."""
    arguments: dict[str, object] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        kind = parameter.annotation
        if isinstance(kind, type) and is_dataclass(kind):
            arguments[name] = kind(**{field.name: values[field.name] for field in fields(kind)})
        else:
            arguments[name] = values[name]
    return arguments


class OrderedGroup(click.Group):
    """Commands in the order of work, each imported when it is asked for: `module:function` of vexport.cli."""

    def __init__(self, *, commands_in: Mapping[str, str], **settings: Any) -> None:
        super().__init__(**settings)
        self.places = commands_in

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name."""
        if cmd_name not in self.places:
            return None
        module, _, function = self.places[cmd_name].partition(":")
        command: click.Command = getattr(import_module(f"vexport.cli.{module}"), function)
        return command

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names in the order of work."""
        return list(self.places)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands, then the options of all."""
        self.format_commands(ctx, formatter)
        records = (parameter.get_help_record(ctx) for parameter in self.get_params(ctx))
        with formatter.section(OTHERS):
            formatter.write_dl([record for record in records if record is not None])

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Name and first sentence of each command."""
        commands = ((name, self.get_command(ctx, name)) for name in self.places)
        rows = [(name, command.get_short_help_str(limit=1000)) for name, command in commands if command]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _key(option: click.Option) -> str:
    """Return the name of an option in `SECTIONS`; click's own have names of their own."""
    return "help" if "--help" in option.opts else option.name or ""


def _short(option: click.Option, record: tuple[str, str]) -> tuple[str, str]:
    """The line of an option in help; of a switch `--[no-]verify`."""
    on, off = option.opts[-1], next(iter(option.secondary_opts), "")
    return (f"--[no-]{on[2:]}", record[1]) if off == f"--no-{on[2:]}" else record


def write_sections(
    parameters: Sequence[click.Parameter], ctx: click.Context, formatter: click.HelpFormatter
) -> None:
    """The options of `parameters` that are not hidden, section by section."""
    options = {_key(option): option for option in parameters if isinstance(option, click.Option)}
    for title, names in SECTIONS.items():
        listed = [name for name in options if _SECTION_OF.get(name, OTHERS) == title]
        chosen = [options[name] for name in sorted(listed, key=[*names, *listed].index)]
        rows = [_short(option, record) for option in chosen if (record := option.get_help_record(ctx))]
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)
