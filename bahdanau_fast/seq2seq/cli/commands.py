"""The commands ``train``, ``translate``, ``evaluate`` and ``plot``: options and help."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bahdanau_fast.seq2seq.cli import actions
from bahdanau_fast.seq2seq.data.corpus import TextSettings
from bahdanau_fast.seq2seq.model.settings import TRAINING
from bahdanau_fast.seq2seq.options import add_options, at_least

_TRAIN = """\
Learn to translate from a UTF-8 text file with one pair per line: the source, a tab, the target.
Further columns are ignored: files of Tatoeba and ManyThings can be used as they are. Without --data
it learns to read synthetic dates. Some thousand pairs are needed, and of so few tens of epochs:
until then a model translates every sentence to the same few words.

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
  python -m bahdanau_fast plot model "Call us ." "I'm OK ." --html attention.html
  python -m bahdanau_fast plot model --out loss.png"""


def add_commands(commands: Any) -> None:
    """Add the four commands to what ``add_subparsers`` returned."""

    def command(action: Any, what: str, description: str, end: str, *options: Any) -> None:
        texts = {"help": what, "description": description, "epilog": end}
        kind = argparse.RawDescriptionHelpFormatter
        parser = commands.add_parser(action.__name__, **texts, formatter_class=kind)
        parser.set_defaults(command=action)
        for add in (*options, _common):
            add(parser)

    what = "learn to translate from a file of pairs"
    command(actions.train, what, _TRAIN, _TRAIN_END, _training)
    what = "translate sentences with a trained model"
    command(actions.translate, what, _TRANSLATE, _TRANSLATE_END, _model, _sentences, _search)
    what = "score a trained model: BLEU and chrF of its translations"
    command(actions.evaluate, what, _EVALUATE, _EVALUATE_END, _model, _pairs, _search)
    what = "plot the attention of a trained model, or its losses"
    command(actions.plot, what, _PLOT, _PLOT_END, _model, _sentences, _picture, _search)


def _training(train: argparse.ArgumentParser) -> None:
    what = "folder for the model, created if missing"
    train.add_argument("--out", type=Path, required=True, metavar="DIR", help=what)
    again = train.add_mutually_exclusive_group()
    what = "continue the training in DIR, with its settings"
    again.add_argument("--resume", action="store_true", help=what)
    again.add_argument("--overwrite", action="store_true", help="replace the training in DIR")
    what = "also write last.pt every STEPS steps (default: only after each epoch)"
    train.add_argument("--save-every", type=at_least(0, int), default=0, metavar="STEPS", help=what)
    what = "write scalars to DIR/tensorboard"
    train.add_argument("--tensorboard", action="store_true", help=what)
    title = "data (with --resume only --data, for a file that was moved)"
    add_options(train.add_argument_group(title), TextSettings())
    title = "model and training (with --resume only --epochs, to raise it)"
    add_options(train.add_argument_group(title), TRAINING)


def _pairs(evaluate: argparse.ArgumentParser) -> None:
    what = "file of pairs to translate"
    evaluate.add_argument("file", nargs="?", type=Path, metavar="FILE", help=what)
    what = "which part of the pairs, cut as in the training (default: all of a FILE, else test)"
    evaluate.add_argument("--split", choices=("all", "train", "validation", "test"), help=what)
    what = "only the first N pairs"
    evaluate.add_argument("--first", type=at_least(1, int), metavar="N", help=what)
    what = "print N translations (default: %(default)s)"
    evaluate.add_argument("--samples", type=at_least(0, int), default=10, metavar="N", help=what)


def _picture(plot: argparse.ArgumentParser) -> None:
    file = plot.add_mutually_exclusive_group()
    what = "picture to write (default: attention.png or loss.png in DIR)"
    file.add_argument("--out", type=Path, metavar="FILE", help=what)
    what = "write a page for a browser, not a picture: the weights word by word, and the search"
    file.add_argument("--html", type=Path, metavar="FILE", help=what)
    plot.add_argument("--overwrite", action="store_true", help="replace the file if it is there")
    what = "a .ttf or .otf file to draw a picture's tokens with"
    plot.add_argument("--font", type=Path, metavar="FILE", help=what)


def _model(parser: argparse.ArgumentParser) -> None:
    what = "folder that train wrote, or one of its checkpoints"
    parser.add_argument("model", type=Path, metavar="DIR", help=what)


def _sentences(parser: argparse.ArgumentParser) -> None:
    what = "one sentence, in quotes; several may follow each other"
    parser.add_argument("sentences", nargs="*", metavar="SENTENCE", help=what)


def _common(parser: argparse.ArgumentParser) -> None:
    what = "where to compute; auto: on a GPU if there is one (default: %(default)s)"
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help=what)
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def _search(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("search")
    what = "translations kept while searching; 1: the likeliest token at each step (default: 5)"
    group.add_argument("--beam", type=at_least(1, int), default=5, metavar="N", help=what)
    penalty = at_least(0.0, float)
    what = "higher prefers longer translations, 0 short ones (default: %(default)s)"
    group.add_argument("--length-penalty", type=penalty, default=1.0, metavar="X", help=what)
    what = "above 0, source tokens without attention lower the score (default: %(default)s)"
    group.add_argument("--coverage-penalty", type=penalty, default=0.0, metavar="X", help=what)
