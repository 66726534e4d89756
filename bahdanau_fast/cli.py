"""The command line, ``python -m bahdanau_fast``; the translator's commands are in ``seq2seq``."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

import bahdanau_fast
from bahdanau_fast import backends
from bahdanau_fast.check import check
from bahdanau_fast.check.machine import versions
from bahdanau_fast.seq2seq.cli import demo
from bahdanau_fast.seq2seq.cli.commands import add_commands
from bahdanau_fast.seq2seq.model.settings import Settings
from bahdanau_fast.seq2seq.options import at_least


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with the option that was likely meant."""

    commands: Sequence[str] = ()  # of the top-level parser
    arguments: Sequence[str] = ()
    mixed = False  # while parse_known_intermixed_args calls parse_known_args

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """Report unknown options here: each command knows its own, in front of and behind words."""
        if self.mixed:
            return super().parse_known_args(args, namespace)
        self.arguments = sys.argv[1:] if args is None else list(args)
        self.mixed = not self.commands and "--" not in self.arguments
        parse = self.parse_known_intermixed_args if self.mixed else super().parse_known_args
        parsed, unknown = parse(args, namespace)
        if unknown:
            self.error(f"unknown arguments: {' '.join(unknown)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        if self.commands and not self.arguments:
            self.print_help(sys.stderr)
        name = self.prog.removeprefix("python -m ")
        self.exit(2, f"{name}: error: {self._unknown() or message}\n")

    def _unknown(self) -> str:
        """The first unknown option or command, with a similar known one; empty if all are known."""
        # Options after a command are checked by the command; arguments after "--" are no options.
        ends = (*self.commands, "--")
        options = [option for action in self._actions for option in action.option_strings]
        for argument in takewhile(lambda argument: argument not in ends, self.arguments):
            option = argument.partition("=")[0]
            if option.startswith("--") and not any(o.startswith(option) for o in options):
                meant = " (options follow their command)" if self.commands else ""
                return f"unknown option {option}{meant or _like(option, options)}"
        if self.commands and not any(argument in self.commands for argument in self.arguments):
            command = next((a for a in self.arguments if not a.startswith("-")), "")
            if command:
                return f"unknown command {command!r}{_like(command, self.commands)}"
            return f"a command is missing, one of {', '.join(self.commands)}"
        return ""


def _like(name: str, names: Sequence[str]) -> str:
    similar = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {similar[0]}?" if similar else " (see --help)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command: 0 on success, 1 if a goal failed, 2 on wrong use or a missing package."""
    try:
        try:
            return _run(_parser().parse_args(arguments))
        finally:
            sys.stdout.flush()
    except OSError as error:  # of what is printed
        # What is left of it goes nowhere: at exit Python flushes again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # nobody reads on
            return 141  # as of a program that the signal ends
        print(f"bahdanau_fast: error: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except BrokenPipeError:
        raise
    except (ValueError, TypeError, ImportError, OSError) as error:
        line = " ".join(str(error).split()) or type(error).__name__
        print(f"bahdanau_fast: error: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stopped:
        print("; ".join(("bahdanau_fast: interrupted", *stopped.args)), file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    script = "bahdanau-fast"
    parser = _Parser(
        prog=script if Path(sys.argv[0]).stem == script else "python -m bahdanau_fast",
        description=(bahdanau_fast.__doc__ or "").split("\n")[0],  # -OO: none
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=bahdanau_fast.__version__)
    names = "{info,check,demo,train,translate,evaluate,plot}"
    commands = parser.add_subparsers(
        required=True, metavar=names, title="commands (each with its own --help)"
    )

    what = "show versions, the backend in use, and why others are not available"
    command = commands.add_parser("info", help=what, description=what.capitalize())
    command.set_defaults(command=lambda _: info())

    what = "compare the results of every available backend with those of plain PyTorch"
    more = (
        ", forward and backward; on a GPU each family of kernels in a process of its own, and what "
        "to switch off. The last line says PASS or FAIL; FAIL is exit code 1."
    )
    command = commands.add_parser("check", help=what, description=what[0].upper() + what[1:] + more)
    command.add_argument(
        "--json",
        metavar="FILE",
        help="write all of it and what there is here to FILE, for a bug report; - is the output",
    )
    command.set_defaults(command=lambda options: 0 if check(options.json) else 1)

    _add_demo(commands)
    add_commands(commands)
    parser.commands = tuple(commands.choices)
    return parser


_EXAMPLES = """\
to begin with:
  python -m bahdanau_fast info
  python -m bahdanau_fast demo
  python -m bahdanau_fast train --data pairs.tsv --out model
  python -m bahdanau_fast translate model "Call us ." """


def _add_demo(commands: Any) -> None:
    what = "train a small date reader on synthetic data, and compare the backends"
    more = (
        "Train a small date reader on synthetic data; then repeat its first steps in plain PyTorch "
        "and compare losses and times: half a minute on two quiet cores. Exit code 1 if a goal is "
        "missed."
    )
    command = commands.add_parser("demo", help=what, description=more)
    what = "where attention.png, loss.png and demo.json go (default: %(default)s)"
    command.add_argument("--out", type=Path, default="demo-output", metavar="DIR", help=what)
    what = "replace what a demo wrote into DIR"
    command.add_argument("--overwrite", action="store_true", help=what)
    what = "passes over the data (default: %(default)s)"
    command.add_argument("--epochs", type=at_least(1, int), default=3, metavar="N", help=what)
    what = "random seed (default: %(default)s)"
    command.add_argument("--seed", type=at_least(0, int), default=0, metavar="N", help=what)
    what = "a smoke run: a tenth of the data, too little to learn"
    command.add_argument("--quick", action="store_true", help=what)
    command.set_defaults(command=_demo)


def _demo(options: argparse.Namespace) -> int:
    settings = Settings(seed=options.seed, epochs=options.epochs)
    sizes = demo.QUICK if options.quick else demo.DemoSizes()
    return 0 if demo.run(options.out, settings, sizes, options.overwrite) else 1


def info() -> int:
    """Print versions and backends; works with a missing or broken extension too."""
    for name, value in versions().items():
        print(f"{name:<14} {value}")
    print(backends.explain())
    return 0
