"""The command line, ``python -m bahdanau_fast``; the translator's commands are in ``seq2seq``."""

from __future__ import annotations

import argparse
import difflib
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

import bahdanau_fast
from bahdanau_fast import backends, parity, reference
from bahdanau_fast.functional import additive_attention
from bahdanau_fast.seq2seq.cli import demo
from bahdanau_fast.seq2seq.cli.commands import add_commands
from bahdanau_fast.seq2seq.cli.cores import HELPS
from bahdanau_fast.seq2seq.model.settings import Settings
from bahdanau_fast.seq2seq.options import at_least

__all__ = ["check", "info", "main"]


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with the option that was likely meant."""

    commands: Sequence[str] = ()  # of the top-level parser
    given: Sequence[str] = ()

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """Report unknown options here: each command knows its own."""
        self.given = sys.argv[1:] if args is None else list(args)
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown arguments: {' '.join(unknown)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        if self.commands and not self.given:
            self.print_help(sys.stderr)
        name = self.prog.removeprefix("python -m ")
        self.exit(2, f"{name}: error: {self._unknown() or message}\n")

    def _unknown(self) -> str:
        """The first unknown option or command, with a similar known one; empty if all are known."""
        # Options after a command are checked by the command; arguments after "--" are no options.
        ends = (*self.commands, "--")
        own = takewhile(lambda argument: argument not in ends, self.given)
        known = [option for action in self._actions for option in action.option_strings]
        for argument in own:
            option = argument.partition("=")[0]
            if option.startswith("--") and not any(o.startswith(option) for o in known):
                meant = " (options follow their command)" if self.commands else ""
                return f"unknown option {option}{meant or _like(option, known)}"
        if self.commands and not any(argument in self.commands for argument in self.given):
            given = next((a for a in self.given if not a.startswith("-")), "")
            if given:
                return f"unknown command {given!r}{_like(given, self.commands)}"
            return f"a command is missing, one of {', '.join(self.commands)}"
        return ""


def _like(given: str, known: Sequence[str]) -> str:
    found = difflib.get_close_matches(given, known, n=1)
    return f"; did you mean {found[0]}?" if found else " (see --help)"


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
    parser = _Parser(
        prog="bahdanau-fast" if _by_script() else "python -m bahdanau_fast",
        description=bahdanau_fast.__doc__.split("\n")[0],
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
    more = ", forward and backward. The last line says PASS or FAIL; FAIL is exit code 1."
    command = commands.add_parser("check", help=what, description=what[0].upper() + what[1:] + more)
    command.set_defaults(command=lambda _: 0 if check() else 1)

    _add_demo(commands)
    add_commands(commands)
    parser.commands = tuple(commands.choices)
    return parser


def _by_script() -> bool:
    return Path(sys.argv[0]).stem == "bahdanau-fast"


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
    command.add_argument(
        "--out",
        type=Path,
        default=Path("demo-output"),
        metavar="DIR",
        help="where attention.png, loss.png and demo.json go (default: %(default)s)",
    )
    what = "replace what a demo wrote into DIR"
    command.add_argument("--overwrite", action="store_true", help=what)
    command.add_argument(
        "--epochs", type=at_least(1, int), metavar="N", help="passes over the data (default: 3)"
    )
    command.add_argument(
        "--seed", type=at_least(0, int), default=0, metavar="N", help="random seed (default: 0)"
    )
    command.add_argument(
        "--quick", action="store_true", help="a smoke run: a tenth of the data, too little to learn"
    )
    command.set_defaults(command=_demo)


def _demo(options: argparse.Namespace) -> int:
    settings = Settings(seed=options.seed)
    if options.epochs is not None:
        settings = replace(settings, epochs=options.epochs)
    sizes = demo.QUICK if options.quick else demo.Sizes()
    return 0 if demo.run(options.out, settings, sizes, options.overwrite) else 1


def info() -> int:
    """Print versions and backends; works with a missing or broken extension too."""
    rows = {
        "bahdanau_fast": f"{bahdanau_fast.__version__} ({Path(bahdanau_fast.__file__).parent})",
        "python": f"{platform.python_version()} ({sys.executable})",
        "torch": torch.__version__,
        "machine": platform.platform(),
        "threads": f"{torch.get_num_threads()} of {os.cpu_count()} cores; {_waiting()}",
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda or "not in this torch",
    }
    for name, value in rows.items():
        print(f"{name:<14} {value}")
    print(backends.explain())
    return 0


def _waiting() -> str:
    """How OpenMP threads wait for one another, and what helps when that takes long."""
    policy = os.environ.get("OMP_WAIT_POLICY")
    if policy is not None:
        return f"OMP_WAIT_POLICY={policy}"
    return f"slow when other programs use the cores? {HELPS} helps"


@dataclass(frozen=True)
class Case:
    """Sizes of one call."""

    name: str
    batch: int
    queries: int
    keys: int
    hidden: int
    features: tuple[int, int, int]
    lens: str = "none"

    def draw(self) -> tuple[list[Tensor], Tensor | None]:
        """Inputs in fp64: queries, keys, values, W_q, W_k, w_v; and the valid lengths."""
        generator = torch.Generator().manual_seed(self.batch * 7919 + self.keys)
        query_size, key_size, value_size = self.features
        shapes = [
            (self.batch, self.queries, query_size),
            (self.batch, self.keys, key_size),
            (self.batch, self.keys, value_size),
            (self.hidden, query_size),
            (self.hidden, key_size),
            (1, self.hidden),
        ]
        scales = [1.0, 1.0, 1.0, query_size**-0.5, key_size**-0.5, 1.0]
        tensors = [
            torch.randn(shape, generator=generator, dtype=torch.float64) * scale
            for shape, scale in zip(shapes, scales, strict=True)
        ]
        if self.lens == "none":
            return tensors, None
        size = (self.batch,) if self.lens == "per row" else (self.batch, self.queries)
        return tensors, torch.randint(0, self.keys + 1, size, generator=generator)


CASES = (
    Case("decoder step", 16, 1, 50, 64, (64, 64, 64), "per row"),
    Case("long source", 1, 1, 1000, 128, (96, 128, 80)),
    Case("many queries", 4, 33, 34, 96, (64, 48, 40), "per query"),
    Case("small primes", 3, 5, 7, 11, (2, 13, 3), "per query"),
    Case("one of each", 1, 1, 1, 1, (1, 1, 1)),
)

_RESULTS = ("context", "weights", "d queries", "d keys", "d values", "d W_q", "d W_k", "d w_v")


def _results(
    function: Callable[..., tuple[Tensor, Tensor | None]],
    case: Case,
    dtype: torch.dtype,
    rounded: torch.dtype,
) -> list[Tensor]:
    """Outputs and gradients in fp64, computed in ``dtype`` from inputs rounded to ``rounded``."""
    tensors, valid_lens = case.draw()
    inputs = [tensor.to(rounded).to(dtype).requires_grad_() for tensor in tensors]
    context, weights = function(*inputs, valid_lens)
    assert weights is not None
    generator = torch.Generator().manual_seed(1)
    upstream = [
        torch.randn(out.shape, generator=generator, dtype=torch.float64).to(rounded).to(dtype)
        for out in (context, weights)
    ]
    torch.autograd.backward([context, weights], upstream)
    grads = [x.grad for x in inputs if x.grad is not None]
    return [result.detach().double() for result in (context, weights, *grads)]


def _allowed(case: Case, dtype: torch.dtype, exact: Tensor, eager_error: float) -> float:
    """What the parity rule allows for one result."""
    largest = float(exact.abs().max())
    if dtype == torch.float64:
        # The exact result is itself a rounded fp64 sum, so eager's error is unknown. Two sums of n
        # terms in different orders are at most n roundings apart each; the longest sum here is
        # that of a weight's gradient.
        terms = case.batch * case.queries * case.keys + case.hidden + max(case.features)
        eager_error = terms * torch.finfo(dtype).eps / 2 * largest
    return parity.allowed(eager_error, largest, dtype)


def _check_one(name: str, case: Case, dtype: torch.dtype) -> tuple[float, float, str]:
    """Largest error of ours and of eager as shares of the allowed one, and the result it is in."""
    ours = partial(additive_attention, backend=name)
    worst = (-1.0, 0.0, "")
    exact = _results(reference.additive_attention, case, torch.float64, dtype)
    eager = _results(reference.additive_attention, case, dtype, dtype)
    result = _results(ours, case, dtype, dtype)
    for label, true, plain, got in zip(_RESULTS, exact, eager, result, strict=True):
        eager_error = parity.error(plain, true)
        allowed = _allowed(case, dtype, true, eager_error)
        share = parity.error(got, true) / allowed
        if share > worst[0]:
            worst = (share, eager_error / allowed, label)
    return worst


def check() -> bool:
    """Print the parity of every available backend; True if all are within the rule."""
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    print("largest error of outputs and gradients, as a share of what the parity rule allows")
    print(f"{'backend':<11}{'dtype':<10}{'case':<14}{'ours':>8}{'eager':>8}   worst in")
    passed = True
    for name in backends.available():
        for dtype in dtypes:
            for case in CASES:
                share, eager, label = _check_one(name, case, dtype)
                good = share <= 1.0
                passed &= good
                kind = str(dtype).removeprefix("torch.")
                row = f"{name:<11}{kind:<10}{case.name:<14}{share:>8.3f}{eager:>8.3f}   {label}"
                print(row if good else f"{row}  FAIL")
    for name in backends.NAMES:
        if name not in backends.available():
            print(f"{name:<11}not checked: {backends.why_not(name)}")
    print("PASS" if passed else "FAIL")
    return passed
