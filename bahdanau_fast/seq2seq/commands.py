"""The commands ``train``, ``translate``, ``evaluate`` and ``plot``: options and help."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from bahdanau_fast.seq2seq.settings import CHOICES, Settings

__all__ = ["TRAINING", "add_commands", "at_least"]

Number = TypeVar("Number", int, float)

TRAINING = Settings(
    embed_size=256,
    num_hiddens=256,
    dropout=0.1,
    embed_dropout=0.3,
    bidirectional=True,
    epochs=20,
    batch_size=64,
    lr=2e-3,
    label_smoothing=0.1,
)
"""What ``train`` takes where nothing is said."""

_TRAIN = """\
Learn to translate from a file of pairs, one a line: source, a tab, target (further columns are
ignored; the layout of Tatoeba and ManyThings). Without --data it learns made-up dates.

DIR gets last.pt after every epoch, and best.pt: the epoch with the lowest loss on the validation
pairs, which are kept apart to choose by (--best-metric chooses by BLEU or chrF). Both files are
written whole or not at all: stop it whenever you like, --resume goes on."""

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
Translate sentences with the model in DIR. Without a sentence, one a line is read from the standard
input."""

_TRANSLATE_END = """\
examples:
  python -m bahdanau_fast translate model "Call us ."
  python -m bahdanau_fast translate model --beam 1 --json "Good night !" "I won !"
  cut -f1 cmn-eng.tsv | python -m bahdanau_fast translate model"""

_EVALUATE = """\
Translate pairs and score the result: corpus BLEU and chrF by sacrebleu, and how many pairs have the
course's bleu(k=2) above 0 and above 0.8. Without FILE it takes the pairs that the training in DIR
kept apart for this."""

_EVALUATE_END = """\
examples:
  python -m bahdanau_fast evaluate model
  python -m bahdanau_fast evaluate model cmn-eng.tsv --first 2000 --json"""

_PLOT = """\
Draw where the model in DIR looked while it translated: source tokens across, target tokens down.
Without a sentence, draw how the loss fell."""

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
            raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
        if not value >= low:
            raise argparse.ArgumentTypeError(f"must be at least {low}, got {text}")
        return value

    return convert


def _run(name: str) -> Callable[[argparse.Namespace], int]:
    """The function of that name, imported when it is called."""

    def run(options: argparse.Namespace) -> int:
        from bahdanau_fast.seq2seq import actions

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
    train.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the model")
    again = train.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="go on with the training in DIR")
    again.add_argument("--overwrite", action="store_true", help="begin anew where one is already")
    train.add_argument(
        "--save-every",
        type=at_least(0, int),
        default=0,
        metavar="STEPS",
        help="write last.pt every so many steps too (default: at the end of each epoch)",
    )
    train.add_argument("--tensorboard", action="store_true", help="scalars to DIR/tensorboard")
    _data_options(train.add_argument_group("data (with --resume only --data, if it was moved)"))
    _model_options(
        train.add_argument_group("model and training (not with --resume, save --epochs)")
    )
    _common(train)

    translate = add("translate", "translate sentences", _TRANSLATE, _TRANSLATE_END)
    _model_and_sentences(translate)
    _search(translate)
    _common(translate)

    evaluate = add("evaluate", "score translations of a file", _EVALUATE, _EVALUATE_END)
    _model(evaluate)
    evaluate.add_argument("file", nargs="?", type=Path, metavar="FILE", help="pairs to translate")
    evaluate.add_argument(
        "--split",
        choices=("all", "train", "validation", "test"),
        help="which part of the pairs, cut as in the training (default: all of a FILE, else test)",
    )
    evaluate.add_argument("--first", type=at_least(1, int), metavar="N", help="only the first N")
    evaluate.add_argument(
        "--samples",
        type=at_least(0, int),
        default=10,
        metavar="N",
        help="show N translations (default: %(default)s)",
    )
    _search(evaluate)
    _common(evaluate)

    plot = add("plot", "draw where the model looked, or how its loss fell", _PLOT, _PLOT_END)
    _model_and_sentences(plot)
    plot.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="picture to write (default: attention.png or loss.png in DIR)",
    )
    plot.add_argument("--overwrite", action="store_true", help="replace that file")
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
    parser.add_argument("sentences", nargs="*", metavar="SENTENCE", help="in quotes, each")


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")


def _search(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("search")
    for name, kind, low, default, what in (
        ("beam", int, 1, 5, "hypotheses kept; 1 takes the likeliest token each step"),
        ("length-penalty", float, 0.0, 1.0, "0 prefers short targets"),
        ("coverage-penalty", float, 0.0, 0.0, "above 0: source tokens left out count"),
    ):
        group.add_argument(
            f"--{name}",
            type=at_least(low, kind),
            default=default,
            metavar="N",
            help=f"{what} (default: {default})",
        )


def _data_options(group: Any) -> None:
    from bahdanau_fast.seq2seq.corpus import TextSettings

    default = TextSettings()

    def add(name: str, what: str, **options: Any) -> None:
        flag, value = "--" + name.replace("_", "-"), getattr(default, name)
        shown = "" if value is None else f" (default: {value})"
        group.add_argument(flag, help=what + shown, default=argparse.SUPPRESS, **options)

    kinds = {"choices": ("auto", "words", "characters")}
    add("data", "file of pairs (default: made-up dates)", type=Path, metavar="FILE")
    add("source_tokens", "what a source is cut into; auto: by the script", **kinds)
    add("target_tokens", "likewise", **kinds)
    add("min_freq", "a token seen less often becomes <unk>", type=at_least(1, int), metavar="N")
    add("num_steps", "longer texts are cut to so many tokens", type=at_least(1, int), metavar="N")
    add("limit", "only the first so many pairs", type=at_least(1, int), metavar="N")
    share = {"type": at_least(0.0, float), "metavar": "SHARE"}
    add("validation", "share of the sources to choose the best epoch by", **share)
    add("test", "share of the sources kept apart for evaluate", **share)


def _model_options(group: Any) -> None:
    helps = {
        "embed_size": "size of an embedding",
        "num_hiddens": "size of a hidden state",
        "num_layers": "recurrent layers on either side",
        "dropout": "on the attention weights and between layers",
        "embed_dropout": "on embeddings and on what gives the logits",
        "cell": "kind of recurrent net",
        "attention": "none: one context for all steps",
        "bidirectional": "read the source from both ends",
        "epochs": "passes over the data; with --resume, more than before are fine",
        "batch_size": "pairs in a step, of each process",
        "lr": "learning rate of Adam at its highest",
        "schedule": "cosine lets the learning rate fall to a twentieth",
        "clip": "largest norm of the gradient",
        "label_smoothing": "share of the probability that goes to all tokens alike",
        "bf16": "compute in bfloat16",
        "seed": "of weights, parts, batches and dropout",
        "best_metric": "what best.pt is the best epoch in, on the validation pairs",
    }
    for field in dataclasses.fields(Settings):
        default = getattr(TRAINING, field.name)
        options: dict[str, Any] = {}
        if field.name in CHOICES:
            options["choices"] = CHOICES[field.name]
        elif isinstance(default, bool):
            options["action"] = argparse.BooleanOptionalAction
        else:
            low: Any = 0 if field.name == "seed" else type(default)(isinstance(default, int))
            options |= {"type": at_least(low, type(default)), "metavar": "N"}
        flag = "--" + field.name.replace("_", "-")
        shown = f"{helps[field.name]} (default: {default})"
        group.add_argument(flag, help=shown, default=argparse.SUPPRESS, **options)
