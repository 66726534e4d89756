"""The commands ``train``, ``translate``, ``evaluate`` and ``plot``: options and help."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from bahdanau_fast.seq2seq.model.settings import CHOICES, TRAINING, Settings

__all__ = ["add_commands", "at_least"]

Number = TypeVar("Number", int, float)

_TRAIN = """\
Learn to translate from a UTF-8 text file with one pair per line: the source, a tab, the target.
Further columns are ignored: files of Tatoeba and ManyThings can be used as they are. Without --data
it learns to read synthetic dates.

DIR gets last.pt after every epoch, and best.pt: the epoch with the lowest loss on the validation
pairs, which are not trained on (--best-metric chooses by BLEU or chrF). Both files are written
atomically: training can be stopped at any time and continued with --resume."""

_TRAIN_END = """\
examples:
  python -m bahdanau_fast train --out dates-model
  python -m bahdanau_fast train --data cmn-eng.tsv --out model --epochs 10
  python -m bahdanau_fast train --resume --out model
  torchrun --nproc-per-node 2 -m bahdanau_fast train --data cmn-eng.tsv --out model

the course's settings:
  python -m bahdanau_fast train --data cmn-eng.tsv --out model --embed-size 32 --num-hiddens 32 \\
    --num-layers 2 --dropout 0.1 --embed-dropout 0 --no-bidirectional --batch-size 64 \\
    --num-steps 10 --lr 0.005 --schedule constant --label-smoothing 0 --min-freq 1"""

_TRANSLATE = """\
Translate sentences with the model in DIR. Without a sentence, sentences are read from the standard
input, one per line."""

_TRANSLATE_END = """\
examples:
  python -m bahdanau_fast translate model "Call us ."
  python -m bahdanau_fast translate model --beam 1 --json "Good night !" "I won !"
  cut -f1 cmn-eng.tsv | python -m bahdanau_fast translate model"""

_EVALUATE = """\
Translate pairs and score the result: corpus BLEU and chrF by sacrebleu, and how many pairs have the
course's bleu(k=2) above 0 and above 0.8. Without FILE it takes the test pairs of the training in
DIR."""

_EVALUATE_END = """\
examples:
  python -m bahdanau_fast evaluate model
  python -m bahdanau_fast evaluate model cmn-eng.tsv --first 2000 --json"""

_PLOT = """\
Plot the attention weights of a translation by the model in DIR: source tokens across, target tokens
down. Without a sentence, plot the losses of the training."""

_PLOT_END = """\
examples:
  python -m bahdanau_fast plot model "Call us ." "I'm OK ."
  python -m bahdanau_fast plot model --out loss.png"""


def at_least(low: Number, kind: Callable[[str], Number]) -> Callable[[str], Number]:
    """A converter for argparse that refuses numbers below ``low``."""

    def convert(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            need = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {need}, got {text!r}") from None
        if math.isinf(value):
            raise argparse.ArgumentTypeError(f"must be finite, got {text}")
        if not value >= low:
            raise argparse.ArgumentTypeError(f"must be at least {low}, got {text}")
        return value

    return convert


def _run(name: str) -> Callable[[argparse.Namespace], int]:
    """An action by name, imported when it is called."""

    def run(options: argparse.Namespace) -> int:
        from bahdanau_fast.seq2seq.cli import actions

        function: Callable[[argparse.Namespace], int] = getattr(actions, name)
        return function(options)

    return run


def add_commands(commands: Any) -> None:
    """Add the four commands.

    Args:
        commands: what ``add_subparsers`` returned.
    """
    add = _adder(commands)
    train = add("train", "learn to translate from a file of pairs", _TRAIN, _TRAIN_END)
    train.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for the model, created if missing",
    )
    again = train.add_mutually_exclusive_group()
    again.add_argument(
        "--resume", action="store_true", help="continue the training in DIR, with its settings"
    )
    again.add_argument("--overwrite", action="store_true", help="replace the training in DIR")
    train.add_argument(
        "--save-every",
        type=at_least(0, int),
        default=0,
        metavar="STEPS",
        help="also write last.pt every STEPS steps (default: only after each epoch)",
    )
    train.add_argument(
        "--tensorboard", action="store_true", help="write scalars to DIR/tensorboard"
    )
    _data_options(
        train.add_argument_group("data (with --resume only --data, for a file that was moved)")
    )
    _model_options(
        train.add_argument_group("model and training (with --resume only --epochs, to raise it)")
    )
    _common(train)

    translate = add(
        "translate", "translate sentences with a trained model", _TRANSLATE, _TRANSLATE_END
    )
    _model_and_sentences(translate)
    _search(translate)
    _common(translate)

    evaluate = add(
        "evaluate",
        "score a trained model: BLEU and chrF of its translations",
        _EVALUATE,
        _EVALUATE_END,
    )
    _model(evaluate)
    evaluate.add_argument(
        "file", nargs="?", type=Path, metavar="FILE", help="file of pairs to translate"
    )
    evaluate.add_argument(
        "--split",
        choices=("all", "train", "validation", "test"),
        help="which part of the pairs, cut as in the training (default: all of a FILE, else test)",
    )
    evaluate.add_argument(
        "--first", type=at_least(1, int), metavar="N", help="only the first N pairs"
    )
    evaluate.add_argument(
        "--samples",
        type=at_least(0, int),
        default=10,
        metavar="N",
        help="print N translations (default: %(default)s)",
    )
    _search(evaluate)
    _common(evaluate)

    plot = add("plot", "plot the attention of a trained model, or its losses", _PLOT, _PLOT_END)
    _model_and_sentences(plot)
    plot.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="picture to write (default: attention.png or loss.png in DIR)",
    )
    plot.add_argument("--overwrite", action="store_true", help="replace the picture if it is there")
    plot.add_argument(
        "--font", type=Path, metavar="FILE", help="a .ttf or .otf file to draw tokens with"
    )
    _search(plot)
    _common(plot)


def _adder(commands: Any) -> Callable[[str, str, str, str], argparse.ArgumentParser]:
    def add(name: str, what: str, description: str, end: str) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = commands.add_parser(
            name,
            help=what,
            description=description,
            epilog=end,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.set_defaults(command=_run(name))
        return parser

    return add


def _model(parser: argparse.ArgumentParser) -> None:
    help_text = "folder that train wrote, or one of its checkpoints"
    parser.add_argument("model", type=Path, metavar="DIR", help=help_text)


def _model_and_sentences(parser: argparse.ArgumentParser) -> None:
    _model(parser)
    parser.add_argument(
        "sentences",
        nargs="*",
        metavar="SENTENCE",
        help="one sentence, in quotes; several may follow each other",
    )


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where to compute; auto: on a GPU if there is one (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def _search(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("search")
    for name, kind, low, default, what in (
        (
            "beam",
            int,
            1,
            5,
            "translations kept while searching; 1: the likeliest token at each step",
        ),
        ("length-penalty", float, 0.0, 1.0, "higher prefers longer translations, 0 short ones"),
        (
            "coverage-penalty",
            float,
            0.0,
            0.0,
            "above 0, source tokens without attention lower the score",
        ),
    ):
        group.add_argument(
            f"--{name}",
            type=at_least(low, kind),
            default=default,
            metavar="N" if kind is int else "X",
            help=f"{what} (default: {default})",
        )


def _data_options(group: Any) -> None:
    from bahdanau_fast.seq2seq.data.corpus import TextSettings

    default = TextSettings()

    def add(name: str, what: str, **options: Any) -> None:
        flag, value = "--" + name.replace("_", "-"), getattr(default, name)
        shown = "" if value is None else f" (default: {value})"
        group.add_argument(flag, help=what + shown, default=argparse.SUPPRESS, **options)

    kinds = {"choices": ("auto", "words", "characters")}
    add("data", "file of pairs (default: synthetic dates)", type=Path, metavar="FILE")
    add(
        "source_tokens",
        "split sources into these; auto: characters for scripts without spaces",
        **kinds,
    )
    add("target_tokens", "the same for targets", **kinds)
    add("min_freq", "rarer tokens are read as <unk>", type=at_least(1, int), metavar="N")
    add(
        "num_steps",
        "longer texts are truncated to this many tokens",
        type=at_least(1, int),
        metavar="N",
    )
    add("limit", "use only the first N pairs of the file", type=at_least(1, int), metavar="N")
    share = {"type": at_least(0.0, float), "metavar": "SHARE"}
    add("validation", "share of the sources to choose the best epoch by", **share)
    add("test", "share of the sources for evaluate", **share)


def _model_options(group: Any) -> None:
    helps = {
        "embed_size": "size of an embedding",
        "num_hiddens": "size of a hidden state",
        "num_layers": "recurrent layers of the encoder, and of the decoder",
        "dropout": "dropout on attention weights and between layers",
        "embed_dropout": "dropout on embeddings and before the output layer",
        "cell": "kind of recurrent network",
        "attention": "kind of attention; none: one fixed context",
        "bidirectional": "read the source from both ends",
        "epochs": "passes over the data",
        "batch_size": "pairs in a step (of each process)",
        "lr": "highest learning rate of Adam",
        "schedule": "of the learning rate; cosine: down to a twentieth",
        "clip": "a gradient with a larger norm is scaled down to it",
        "label_smoothing": "probability spread over all tokens",
        "bf16": "compute in bfloat16",
        "seed": "random seed of weights, splits, batches and dropout",
        "best_metric": "how best.pt is chosen: lowest loss, or highest BLEU or chrF",
    }
    for field in dataclasses.fields(Settings):
        default = getattr(TRAINING, field.name)
        options: dict[str, Any] = {}
        if field.name in CHOICES:
            options["choices"] = CHOICES[field.name]
        elif isinstance(default, bool):
            options["action"] = argparse.BooleanOptionalAction
        else:
            whole = isinstance(default, int)
            low: Any = 0 if field.name == "seed" else type(default)(whole)
            options |= {"type": at_least(low, type(default)), "metavar": "N" if whole else "X"}
        flag = "--" + field.name.replace("_", "-")
        said = {True: "yes", False: "no"}[default] if isinstance(default, bool) else default
        shown = f"{helps[field.name]} (default: {said})"
        group.add_argument(flag, help=shown, default=argparse.SUPPRESS, **options)
