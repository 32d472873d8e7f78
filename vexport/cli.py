"""The command line: `commands/`, and the one place where an outcome becomes an exit code."""

import os
import sys
import traceback

import click

from vexport.commands import COMMANDS
from vexport.commands.base import EXIT_CODES
from vexport.errors import VexportError
from vexport.version import __version__

ENVIRONMENT = 4
INTERRUPTED = 130


def main() -> None:
    """Run a command; every outcome becomes an exit code and one line an error."""
    try:
        result = cli.main(prog_name="vexport", standalone_mode=False)
        code = result if isinstance(result, int) else 0
    except (click.exceptions.Abort, KeyboardInterrupt):
        code = _say("interrupted; the same command goes on where it stopped", INTERRUPTED)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "vexport"
        code = _say(f"{command}: {error.format_message()} See `{command} --help`.", error.exit_code)
    except VexportError as error:
        code = _say(str(error), error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception as error:
        code = _say(_unforeseen(error), ENVIRONMENT)
    sys.exit(code)


def _unforeseen(error: Exception) -> str:
    """One line for what no stage turned into an error of its own."""
    if isinstance(error, MemoryError):
        return "memory: got no more, need more than this machine has; free some or use a larger machine"
    if isinstance(error, OSError):
        place, reason = error.filename or "file system", error.strerror or error
        return (
            f"{place}: got {reason}, need a file that can be read and written; check path, space and rights"
        )
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"vexport: got an internal error ({text}), need none; call again with --debug and report it"


def _say(message: str, code: int) -> int:
    if "--debug" in sys.argv:
        traceback.print_exc()
    for line in message.splitlines():
        print(f"error: {line}", file=sys.stderr)
    return code


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}, epilog=EXIT_CODES
)
@click.version_option(__version__, prog_name="vexport")
def cli() -> None:
    """Quantize a Hugging Face checkpoint for vLLM, and show that it loads and is accurate enough.

    \b
    Start here:
      vexport run scenarios/demo-nvfp4.yaml                       everything, one verdict
      vexport quantize MODEL OUT --scheme FP8_DYNAMIC             a checkpoint for vLLM
      vexport check OUT                                           is it sound? no GPU, no vLLM
      vexport eval OUT --baseline MODEL --task gsm8k              is it accurate enough?
    """


for one in COMMANDS:
    cli.add_command(one)
