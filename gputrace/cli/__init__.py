"""Command ``gputrace``: nothing heavy is imported until a subcommand runs."""

from __future__ import annotations

import io
import os
import sys
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Final, NoReturn

import click

from gputrace.cli import console
from gputrace.cli.console import log
from gputrace.errors import ExitCode, GputraceError
from gputrace.sanitize import clean
from gputrace.version import __version__

GROUPS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "Record": {
        "record": (
            "record.command",
            "gputrace record -- python train.py",
            "gputrace record --python -- torchrun --nproc-per-node 4 train.py",
            "gputrace record --steps 20:40 -- python train.py",
        ),
        "arm": (
            "arm.arm",
            "gputrace arm -- torchrun --nproc-per-node 4 train.py",
            "gputrace arm --env",
        ),
        "on": (
            "arm.on",
            "gputrace on",
            "gputrace on 4711 --steps 20 -o slow.sqlite",
        ),
        "off": ("arm.off", "gputrace off 4711"),
        "watch": (
            "watch.command",
            "gputrace watch",
            "gputrace watch 4711 --metrics 9400 --alert 'notify-send \"$GPUTRACE_ALERT\"'",
            "gputrace watch --otlp http://collector:4318",
        ),
        "k8s": (
            "k8s.command",
            "gputrace k8s patch job.yaml -o armed.yaml",
            "gputrace k8s patch job.yaml --with record --claim traces -o recorded.yaml",
        ),
        "status": ("arm.status", "gputrace status 4711 --json"),
        "list": ("arm.list_", "gputrace list"),
    },
    "Look": {
        "demo": ("demo.command", "gputrace demo", "gputrace demo -o demo.sqlite"),
        "analyze": (
            "analyze.analyze",
            "gputrace analyze trace.sqlite",
            "gputrace analyze trace.sqlite --time 12s:14s",
            "gputrace analyze rank0.sqlite rank1.sqlite --format markdown",
        ),
        "browse": (
            "analyze.browse",
            "gputrace browse trace.sqlite",
            "gputrace browse before.sqlite --beside after.sqlite",
            "gputrace browse --demo",
        ),
        "report": (
            "analyze.report",
            "gputrace report trace.sqlite -o report.html",
            "gputrace report trace.sqlite --serve",
        ),
        "export": (
            "analyze.export",
            "gputrace export trace.sqlite --to perfetto",
            "gputrace export trace.sqlite --to trace --time 12s:14s --redact",
        ),
        "log": (
            "analyze.log",
            "gputrace log trace.sqlite --to tensorboard:runs/resnet",
            "gputrace log trace.sqlite --to wandb:resnet --to mlflow:resnet",
        ),
        "kernel": (
            "kernel.command",
            "gputrace kernel trace.sqlite longest",
            "gputrace kernel trace.sqlite gemm -- python train.py",
        ),
    },
    "Compare": {
        "try": (
            "try_.command",
            "gputrace try -- python train.py",
            "gputrace try workers=8,pinned+fused -- python train.py",
            "gputrace try --history",
        ),
        "compare": (
            "analyze.compare",
            "gputrace compare before.sqlite after.sqlite",
            "gputrace compare 1gpu.sqlite 2gpus.sqlite 4gpus.sqlite --batch 64",
        ),
        "check": (
            "check.command",
            "gputrace check trace.sqlite --max-data-feeding 5% --max-step-time 65ms",
            "gputrace check trace.sqlite --baseline main.sqlite --max-slowdown 5%",
        ),
        "bench": (
            "bench.command",
            "gputrace bench study.toml --dry-run",
            "gputrace bench study.toml --only framework=torch",
        ),
    },
    "Operate": {
        "mcp": (
            "mcp.command",
            "gputrace mcp runs/",
            "gputrace mcp . -- python train.py",
        ),
        "skill": ("installation.skill", "gputrace skill"),
        "doctor": ("installation.doctor", "gputrace doctor"),
    },
    "Rarely needed": {
        "recover": ("record.recover", "gputrace recover trace.sqlite.spool"),
        "recipe": (
            "installation.recipe",
            "NSYS_RECIPE_PATH=$(gputrace recipe) nsys recipe gputrace_analyze --help",
        ),
        "completion": ("installation.completion", "gputrace completion bash"),
        "schema": ("installation.schema", "gputrace schema analysis"),
        "plugins": ("installation.plugins", "gputrace plugins --check"),
    },
}
"""Commands as help groups them: a click command in a module of this package, and examples."""
COMMANDS: Final = {name: row for group in GROUPS.values() for name, row in group.items()}
COMPLETES: Final = "_GPUTRACE_COMPLETE"
"""Variable with which a shell's script calls gputrace for completions."""


_LONGEST_HELP: Final = 200
_INSTEAD: Final = {
    "record --": "profile run start trace",
    "analyze": "explain gap gaps show stats steps summary verdict",
    "browse": "gui timeline tui ui view",
    "report": "html link open page serve share web",
    "compare": "diff",
    "kernel": "kernels longest",
    "check": "gate test",
}
"""Words of other tools, by what does it here."""
_INSTEAD_OF_OPTION: Final = {
    **dict.fromkeys(("-o", "--output"), "> FILE keeps what it prints; `gputrace report` has -o"),
    "--html": "`gputrace report` writes a page (--compare: of two runs)",
    **dict.fromkeys(("--kernel", "--kernels", "--top"), "see `gputrace kernel --help`"),
    "--baseline": "write `gputrace compare A B`",
}
"""Words to type in place of options that only other commands have."""


_VERBOSITY: Final = [
    click.Option(
        [f"-{name[0]}", f"--{name}"],
        is_flag=True,
        expose_value=False,
        callback=console.set_verbosity,
        help=text,
    )
    for name, text in (
        ("quiet", "Show results and errors only."),
        ("verbose", "Also show time, memory and, of an error, where it arose."),
    )
]
"""Options of every command."""


class _Commands(click.Group):
    """Group that imports a subcommand when it is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        target, *examples = COMMANDS[cmd_name]
        module, _, function = target.rpartition(".")
        command: click.Command = getattr(import_module(f"gputrace.cli.{module}"), function)
        if not any(option is _VERBOSITY[0] for option in command.params):
            command.params += _VERBOSITY
        command.epilog = "\n  ".join(["\b\nExamples:", *examples])
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name in COMMANDS or name.startswith("-"):
            return super().resolve_command(ctx, args)
        import shlex
        import shutil
        from difflib import get_close_matches

        rest, hint = shlex.join(word for word in args[1:] if word != "--"), ""
        if meant := next((does for does, words in _INSTEAD.items() if name in words.split()), ""):
            hint = f"; write: gputrace {meant} {rest}".rstrip()
        elif name == "help":
            hint = "; write: " + " ".join(["gputrace", *args[1:2], "--help"])
        elif close := get_close_matches(name, COMMANDS, 1):
            hint = f"; did you mean `{close[0]}`?"
        elif name.endswith(".py") or shutil.which(name):
            python = "python " if name.endswith(".py") else ""
            hint = f"; to record it: gputrace record -- {python}{shlex.quote(name)} {rest}".rstrip()
        elif Path(name).is_file():
            hint = f"; to see where its time went: gputrace analyze {shlex.quote(name)}"
        ctx.fail(f"no such command: {name}{hint}")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, group in GROUPS.items():
            commands = {name: self.get_command(ctx, name) for name in group}
            texts = {n: c.get_short_help_str(_LONGEST_HELP) for n, c in commands.items() if c}
            with formatter.section(title):
                formatter.write_dl(list(texts.items()))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gputrace")
@click.pass_context
def cli(context: click.Context) -> None:
    """Show where each training step's time goes on NVIDIA GPUs, and what to change."""
    from gputrace.cli import options

    name = context.invoked_subcommand
    command = cli.get_command(context, name) if name in options.CONFIGURED else None
    if name and command is not None:
        asked = click.Context(command, context, name)
        context.default_map = {name: options.read_defaults(command, asked)}


def end(code: int) -> NoReturn:
    """End this process with an exit code.

    Where a signal ended a recorded program (-N), it ends this process too, without a core of its
    own, so that a shell's loop stops at Ctrl+C as it would without the recorder.
    """
    if code >= 0:
        sys.exit(code)
    import resource
    import signal

    number = -code
    sys.stderr.flush()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError):  # SIGKILL has no handler.
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    sys.exit(128 + number)  # The signal ends no process.


def run(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code, -N where signal N ended a recorded program.

    Every failure is told in one line on stderr.
    """
    if instruction := os.environ.get(COMPLETES):
        from click.shell_completion import shell_complete

        return shell_complete(cli, {}, "gputrace", COMPLETES, instruction)
    _replace_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    arguments = sys.argv[1:] if arguments is None else arguments
    console.reset_verbosity()
    began = time.monotonic()
    try:
        # Not by its `main`, which exits with 1 at a broken pipe: the code for an unmet gate.
        with cli.make_context("gputrace", arguments) as context:
            result = cli.invoke(context)
        sys.stdout.flush()
        if console.is_verbose():
            import resource

            most = max(resource.getrusage(who).ru_maxrss for who in (0, resource.RUSAGE_CHILDREN))
            took = f"{time.monotonic() - began:,.1f} s"
            log(f"took {took}, and {most / 1000:,.0f} MB in its largest process")
        return result if isinstance(result, int) else ExitCode.DONE
    except click.exceptions.Exit as end:
        sys.stdout.flush()
        return end.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return ExitCode.USAGE
    except BrokenPipeError:
        _drop_output()
        return ExitCode.DONE
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, OSError):
            _drop_output()
        problem = explain(error)
        if problem is None:
            raise
        log(problem[0])
        if console.is_verbose():
            _log_origin(error)
        return problem[1]


def _log_origin(error: BaseException) -> None:
    import traceback

    for line in "".join(traceback.format_exception(error)).splitlines():
        click.echo(clean(line), err=True)


def explain(error: BaseException) -> tuple[str, ExitCode] | None:
    """Return the line and the exit code for a failure; None for an unexpected one."""
    match error:
        case click.UsageError():
            path = error.ctx.command_path if error.ctx else "gputrace"
            # These keep 2 for their program, as `timeout` and `docker run` do.
            runs = path.endswith((" record", " arm"))
            code = ExitCode.RECORDING_FAILED if runs else ExitCode.USAGE
            return f"{_problem(error)} (see {path} --help)", code
        case click.ClickException():
            return error.format_message(), ExitCode.USAGE
        case GputraceError():
            return str(error), error.exit_code
        case click.Abort() | KeyboardInterrupt():
            return "interrupted", ExitCode.INTERRUPTED
        case OSError():
            where = error.filename or "the output"
            return f"{where}: {error.strerror or repr(error)}", ExitCode.MISSING_HERE
        case MemoryError():
            problem = "not enough memory for this trace; look at a part of it (--time)"
            return problem, ExitCode.MISSING_HERE
        case _:
            from gputrace.plugins import blame

            plugin_error = blame(error)
            return (str(plugin_error), plugin_error.exit_code) if plugin_error else None


def _problem(error: click.UsageError) -> str:
    """Return what is wrong with a command line; for an unknown option, what may be meant."""
    params = error.ctx.command.params if error.ctx is not None else []
    if not isinstance(error, click.NoSuchOption):
        has_baseline = any(param.name == "baseline" for param in params)
        hint = "; --baseline names the run to compare with"
        is_other_run = has_baseline and "extra argument" in error.message
        return f"{error.format_message()}{hint if is_other_run else ''}"
    from difflib import get_close_matches

    name = error.option_name
    options = {opt.strip("-"): opt for param in params for opt in param.opts if opt[:2] == "--"}
    forms = next((getattr(p.type, "choices", ()) for p in params if p.name == "form"), ())
    close = get_close_matches(name.strip("-"), options, 2, 0.7)
    hint = f"; did you mean {' or '.join(options[word] for word in close)}?" if close else ""
    if name.strip("-") in forms:
        hint = f"; write --format {name.strip('-')}"
    elif name in _INSTEAD_OF_OPTION:
        hint = f"; {_INSTEAD_OF_OPTION[name]}"
    return f"no such option: {name}{hint}"


def _replace_closed_streams() -> None:
    """Replace closed stdout or stderr by /dev/null here; child programs still get it closed."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, "w"), encoding="utf-8"))


def _drop_output() -> None:
    """Discard pending output, so that Python does not fail on it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
