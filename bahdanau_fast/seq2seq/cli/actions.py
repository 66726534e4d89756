"""The commands ``train``, ``translate``, ``evaluate`` and ``plot``, given their options."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bahdanau_fast import backends, checks
from bahdanau_fast.seq2seq.cli import plots
from bahdanau_fast.seq2seq.cli.cores import busy
from bahdanau_fast.seq2seq.data.corpus import Corpus, RawPair, TextSettings, read, tokenize
from bahdanau_fast.seq2seq.model import checkpoints
from bahdanau_fast.seq2seq.model.settings import METRICS, TRAINING, Settings
from bahdanau_fast.seq2seq.page import attention_page
from bahdanau_fast.seq2seq.search.beam import Beam
from bahdanau_fast.seq2seq.search.translator import Translation, Translator
from bahdanau_fast.seq2seq.training.runs import Run, described
from bahdanau_fast.seq2seq.training.trainer import join


def train(options: argparse.Namespace) -> int:
    """Train, or resume a training, in a folder."""
    settings, text = _settings(options)
    going = {name: getattr(options, name) for name in ("resume", "save_every", "tensorboard")}
    with join(_device(options.device)) as world:
        # With --json the standard output is for scripts.
        file = sys.stderr if options.json else sys.stdout
        run = Run(options.out, settings, text, world=world, **going)
        first = world.rank == 0
        if first:
            note(run.corpus.note)
            print(_about(run), file=file, flush=True)
            note(busy() if world.device.type == "cpu" else "")
        before, start = len(run.history.losses), time.perf_counter()
        try:
            history = run.train(file=file)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"--resume --out {options.out} goes on") from None
        seconds = time.perf_counter() - start
    if first and options.json:
        figures = {
            "out": str(options.out),
            "steps": len(history.losses),
            "loss": history.losses[-1],
            "seconds": seconds,
            "tokens_per_second": history.tokens_per_second,
            "best": run.best,
            "validations": history.validations,
            "settings": dataclasses.asdict(settings),
            "text": dataclasses.asdict(text) | {"data": text.data and Path(text.data).name},
        }
        print(json.dumps(figures, indent=1, ensure_ascii=False))
    elif first:
        if before == len(history.losses):
            print(f"all epochs are done ({settings.epochs}); --epochs N goes on")
        else:
            speed = f"{history.tokens_per_second:,.0f} target tokens/s"
            print(f"wrote {options.out}{os.sep} in {seconds:.0f} s, {speed}")
        print(_chosen(run))
    return 0


def _settings(options: argparse.Namespace) -> tuple[Settings, TextSettings]:
    """Settings from the command line, or with --resume from the checkpoint."""
    chosen, texts = (
        {f.name: getattr(options, f.name) for f in dataclasses.fields(kind) if f.name in options}
        for kind in (Settings, TextSettings)
    )
    replaced = options.resume or options.overwrite
    files = () if replaced else (checkpoints.LAST, checkpoints.BEST)
    ways = "--resume continues it, --overwrite replaces it"
    check_folder(options.out, "training", files, ways)
    if not options.resume:
        settings = dataclasses.replace(TRAINING, **chosen)
        return settings, TextSettings(**{**texts, "seed": settings.seed})
    settings, text = Run.settings_of(options.out)
    epochs = chosen.pop("epochs", settings.epochs)
    data = texts.pop("data", text.data)  # the file may have been moved
    extra = [f"--{name.replace('_', '-')}" for name in {**chosen, **texts}]
    if extra:
        need = "must be left out with --resume, which keeps the training's settings"
        raise ValueError(f"{' and '.join(extra)} {need}")
    if epochs < settings.epochs:
        need = f"be at least {settings.epochs}, the epochs of the training"
        checks.reject(ValueError, "--epochs", need, epochs)
    return dataclasses.replace(settings, epochs=epochs), dataclasses.replace(text, data=data)


def check_folder(out: Path, what: str, files: Sequence[str], ways: str) -> None:
    """Refuse a folder that cannot be written to, or holds one of the files."""
    folder = next(path for path in (out, *out.parents) if os.path.exists(path))
    if not folder.is_dir():
        checks.reject(ValueError, "--out", "be a folder or a new path", out)
    if not os.access(folder, os.W_OK | os.X_OK):
        actual = f"{out} ({folder} is read-only)"
        checks.reject(ValueError, "--out", "be a folder that can be written to", actual)
    if any((out / name).exists() for name in files):
        checks.reject(ValueError, "--out", f"hold no {what}", f"{out} ({ways})")


def note(line: str) -> None:
    """Print a line, if there is one, where it disturbs no results."""
    if line:
        print(line, file=sys.stderr)


def _about(run: Run) -> str:
    parts, size = run.corpus.parts, sum(p.numel() for p in run.trainer.model.parameters())
    kinds = f"{run.corpus.kinds[0]} to {run.corpus.kinds[1]}"
    vocabs = f"{len(run.pairs.source_vocab):,} and {len(run.pairs.target_vocab):,} tokens"
    spared = f"{len(parts.validation):,} for validation, {len(parts.test):,} for test"
    pairs = "pair" if len(parts.train) == 1 else "pairs"
    return (
        f"{len(parts.train):,} training {pairs} ({spared}), {kinds}, {vocabs}; "
        f"{size:,} parameters, attention backend {backends.resolve(run.world.device)}"
    )


def _chosen(run: Run) -> str:
    """Which epoch ``translate`` will use."""
    if run.best is None:
        return f"{checkpoints.LAST} is the last epoch; no validation pairs, so there is no best one"
    metric = METRICS[run.settings.best_metric]
    return (
        f"{checkpoints.BEST} is epoch {run.best['epoch']}, the best by validation {metric} "
        f"({described(run.best)})"
    )


def _device(name: str) -> str:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        checks.reject(ValueError, "--device", "be available to this torch", name)
    return ("cuda" if available else "cpu") if name == "auto" else name


def _beam(options: argparse.Namespace, record: bool = False) -> Beam | None:
    if options.beam == 1 and not options.coverage_penalty:
        return None
    return Beam(options.beam, options.length_penalty, options.coverage_penalty, record)


def _load(options: argparse.Namespace) -> Translator:
    return Translator.load(options.model, _device(options.device))


def translate(options: argparse.Namespace) -> int:
    """Translate sentences of the command line or the standard input."""
    translator = _load(options)
    sentences: list[str] = options.sentences or [line.rstrip("\n") for line in sys.stdin]
    translations = translator.translate(sentences, _beam(options))
    _note_unread(translator, sentences, translations)
    if not options.json:
        for translation in translations:
            print(translator.joined(translation))
        return 0
    rows = [
        {
            "source": sentence,
            "translation": translator.joined(translation),
            "score": translation.score,
            "source_tokens": translation.source,
            "tokens": translation.tokens,
            "attention": _rounded(translation.weights),
            "end_attention": _rounded(translation.end_weights),
        }
        for sentence, translation in zip(sentences, translations, strict=True)
    ]
    print(json.dumps(rows, indent=1, ensure_ascii=False))
    return 0


def _rounded(weights: Tensor | None) -> Any:
    return None if weights is None else weights.double().round(decimals=4).tolist()


def _note_unread(
    translator: Translator, sentences: Sequence[str], translations: Sequence[Translation]
) -> None:
    """Say which tokens the model does not know, and which lie behind the last that it reads."""
    unknown: list[str] = []
    unread: list[str] = []
    for sentence, translation in zip(sentences, translations, strict=True):
        unknown += [token for token in translation.source if token not in translator.source_vocab]
        unread += tokenize(sentence, translator.kinds[0])[len(translation.source) :]
    cut = f"cut to the model's {translator.text.num_steps} tokens, without"
    for what, tokens in (("not in the vocabulary, read as <unk>", unknown), (cut, unread)):
        different = list(dict.fromkeys(tokens))
        shown = " ".join(different[:8]) + (" ..." if len(different) > 8 else "")
        note(f"note: {what}: {shown}" if different else "")


def _pairs(options: argparse.Namespace, translator: Translator) -> tuple[list[RawPair], str]:
    """The pairs to translate, and the name of their part."""
    part = options.split or ("test" if options.file is None else "all")
    if options.file is not None and part == "all":
        file = read(options.file)  # all of it, whatever the training took of its own
        pairs, skipped = file.pairs, file.note()
    else:
        data = translator.text.data if options.file is None else str(options.file)
        corpus = Corpus.of(dataclasses.replace(translator.text, data=data))
        pairs = corpus.pairs if part == "all" else getattr(corpus.parts, part)
        skipped = corpus.note
    note(skipped)
    if not pairs:
        checks.reject(ValueError, "--split", "name a part that holds pairs", part)
    return pairs[: options.first], part


def evaluate(options: argparse.Namespace) -> int:
    """Translate pairs and score the result."""
    translator = _load(options)
    pairs, part = _pairs(options, translator)
    start = time.perf_counter()
    translations = translator.translate([source for source, _ in pairs], _beam(options))
    seconds = time.perf_counter() - start
    scores = translator.score(pairs, translations)
    rows = [
        {"source": source, "translation": translator.joined(translation), "reference": target}
        for (source, target), translation in zip(pairs, translations, strict=True)
    ]
    samples = rows[:: max(1, len(pairs) // max(1, options.samples))][: options.samples]
    figures = {
        "pairs": len(pairs),
        "part": part,
        "file": Path(options.file or translator.text.data or "dates").name,
        "bleu": scores.corpus.bleu,
        "chrf": scores.corpus.chrf,
        "signature": scores.corpus.signature,
        "course_bleu_above_0": scores.bleu_above_0,
        "course_bleu_above_0.8": scores.bleu_above_08,
        "exact": scores.exact,
        "beam": options.beam,
        "length_penalty": options.length_penalty,
        "coverage_penalty": options.coverage_penalty,
        "seconds": seconds,
        "settings": dataclasses.asdict(translator.settings),
        "samples": samples,
    }
    if options.json:
        print(json.dumps(figures, indent=1, ensure_ascii=False))
        return 0
    for sample in samples:
        print(f"{sample['source']} -> {sample['translation']}   (reference: {sample['reference']})")
    print(
        f"{len(pairs):,} pairs ({part}) in {seconds:.1f} s: BLEU {scores.corpus.bleu:.2f}, "
        f"chrF {scores.corpus.chrf:.2f}  [{scores.corpus.signature}]\n"
        f"bleu(k=2) above 0: {scores.bleu_above_0:,}, above 0.8: {scores.bleu_above_08:,}; "
        f"right to the last token: {scores.exact:,}"
    )
    return 0


def _curves(where: Path) -> Any:
    """The losses of a training, and the validation of the epoch its ``best.pt`` holds."""
    best, last = (where.parent / name for name in (checkpoints.BEST, checkpoints.LAST))
    path = last if last.is_file() else where
    with checkpoints.fitting(path):
        payload = checkpoints.load(path)
        losses, validations = payload["losses"].tolist(), payload["validations"]
    if not losses:
        checks.reject(ValueError, "DIR", "hold a training with at least one step", where.parent)
    with checkpoints.fitting(best):
        chosen = checkpoints.last_validation(best)
        epoch = None if chosen is None else chosen["epoch"]
    return plots.training_curves(losses, validations, epoch)


def plot(options: argparse.Namespace) -> int:
    """Plot attention weights, as a picture or a page, or without sentences the losses."""
    if options.html is None:
        plots.require_matplotlib()
    elif not options.sentences:
        checks.reject(ValueError, "--html", "come with at least one sentence", "none")
    where = checkpoints.find(options.model)
    default = "attention.png" if options.sentences else "loss.png"
    out: Path = options.html or options.out or where.parent / default
    if out.exists() and not options.overwrite:
        need = "be a new path (--overwrite replaces the file)"
        checks.reject(ValueError, "--out" if options.html is None else "--html", need, out)
    if options.font is not None:
        plots.add_font(options.font)
    undrawn = ""
    if options.html is not None:
        beam = _beam(options, record=True)
        # Each sentence on its own: the search of a batch ends with its longest.
        translations = _load(options).translate(options.sentences, beam, batch_size=1)
        out.write_text(attention_page(translations), encoding="utf-8")
    elif options.sentences:
        translations = _load(options).translate(options.sentences, _beam(options))
        for sentence, translation in zip(options.sentences, translations, strict=True):
            if translation.source and not translation.tokens:
                raise ValueError(f"the model translated {sentence!r} to nothing; train longer")
        figure, undrawn = plots.attention_figure(translations)
        plots.save(figure, out)
    else:
        plots.save(_curves(where), out)
    if options.json:
        print(json.dumps({"wrote": str(out), "note": undrawn}, ensure_ascii=False))
    else:
        print(f"wrote {out}")
        note(undrawn and f"note: {undrawn}")
    return 0
