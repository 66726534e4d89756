"""Studies of the translator: backends in training, beam search, and scores of trained models.

``python -m benchmarks.seq2seq backends FILE`` trains the same first steps on the fused op and on
the reference, in turns, and compares losses, translations and time. ``beam DIR`` translates 64
held-out sentences with a trained model, with the beams as queries on one memory and with a copy of
the memory for each beam. ``scores DIR...`` scores trained models. ``--json OUT`` keeps the figures.
docs/seq2seq.md shows the tables.
"""

from __future__ import annotations

import argparse
import operator
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from bahdanau_fast import backends
from bahdanau_fast.seq2seq import (
    Beam,
    StepDecoder,
    Translator,
    beam_search,
    encode,
    greedy,
)
from bahdanau_fast.seq2seq.cli.demo import compare_training, relative_difference
from bahdanau_fast.seq2seq.data.corpus import Corpus, TextSettings, tokenize
from bahdanau_fast.seq2seq.model import checkpoints
from bahdanau_fast.seq2seq.model.settings import TRAINING

from .studies.peak_memory import allocator_events
from .timing.machine import save
from .timing.measure import Timings, interleave

HIDDEN = (32, 256, 512)
SENTENCES = 64
FIRST = 2000
COURSE_SENTENCES = ("Go .", "Good Night !", "I'm OK .", "I won !", "Call us .")


@contextmanager
def copied(decoder: StepDecoder, width: int) -> Iterator[None]:
    """Inside, the decoder's memory holds every source ``width`` times, once for each beam."""

    def memory(state: list[Any]) -> Any:
        outputs, hidden, lens = state
        lens = None if lens is None else lens.repeat_interleave(width)
        return type(decoder).memory(decoder, [outputs.repeat_interleave(width, 0), hidden, lens])

    decoder.memory = memory  # type: ignore[method-assign]
    try:
        yield
    finally:
        del decoder.memory


def allocations(work: Callable[[], Any]) -> list[int]:
    """Bytes of every allocation for tensors during ``work``, in C++ operators too."""
    return [size for size in allocator_events(work) if size > 0]


def compare_backends(data: Path | None, steps: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Train the first steps without dropout on each backend, for each hidden size."""
    text = TextSettings(None if data is None else str(data))
    corpus = Corpus.of(text)
    pairs = corpus.encode(corpus.parts.train, text)
    names = [backends.resolve(torch.device("cpu")), "reference"]
    sources = [tokenize(source, corpus.kinds[0]) for source, _ in corpus.parts.test[:200]]
    rows = []
    for hidden in sizes:
        settings = replace(
            TRAINING, embed_size=hidden, num_hiddens=hidden, dropout=0.0, embed_dropout=0.0
        )
        compared = compare_training(pairs, settings, names, steps)
        tokens, lens = encode(sources, pairs.source_vocab, text.num_steps)
        answers = {}
        for name, model in compared.models.items():
            with backends.use(name):
                answers[name] = greedy(model, tokens, lens, text.num_steps)[0].tolist()
        losses = [compared.losses[name] for name in names]
        row = {
            "hidden": hidden,
            "steps": len(losses[0]),
            "loss_max_relative_difference": relative_difference(*losses),
            "last_loss": losses[0][-1],
            "same_translations": sum(map(operator.eq, *(answers[name] for name in names))),
            "translations": len(sources),
            "step_seconds": Timings(compared.times).packed(),
            "tokens_per_second": compared.tokens_per_second,
        }
        rows.append(row)
        ours, theirs = (row["step_seconds"][name]["median"] for name in names)
        speeds = " and ".join(f"{row['tokens_per_second'][name]:,.0f}" for name in names)
        print(
            "hidden {hidden}: losses of {steps} steps within {loss_max_relative_difference:.1e}, "
            "{same_translations} of {translations} translations the same; ".format(**row)
            + f"a step {ours * 1e3:.1f} ms and {theirs * 1e3:.1f} ms ({theirs / ours:.2f}x), "
            f"{speeds} tokens/s",
            flush=True,
        )
    return {"backends": names, "settings": asdict(TRAINING), "rows": rows}


def compare_beams(where: Path, seconds: float) -> dict[str, Any]:
    """Search 64 sentences: greedily, with beams as queries, and with beams as copies."""
    translator, beam = Translator.load(where), Beam()
    corpus = Corpus.of(translator.text)
    chosen = random.Random(0).sample(corpus.parts.test, SENTENCES)
    texts = [tokenize(source, translator.kinds[0]) for source, _ in chosen]
    width = min(max(map(len, texts)) + 1, translator.text.num_steps)
    source, lens = encode(texts, translator.source_vocab, width)
    model, most = translator.model, translator.text.num_steps
    decoder = model.decoder
    if not isinstance(decoder, StepDecoder):
        raise TypeError(f"the decoder must be a StepDecoder, got {type(decoder).__name__}")

    def queries() -> Any:
        return beam_search(model, source, lens, most, beam)

    def copies() -> Any:
        with copied(decoder, beam.width):
            return queries()

    calls = {"greedy": lambda: greedy(model, source, lens, most), "queries": queries}
    calls["copies"] = copies
    same = (queries().tokens[:, 0] == copies().tokens[:, 0]).all(1)
    timings = interleave(calls, seconds)
    hidden = translator.settings.num_hiddens
    features = getattr(model.encoder, "output_size", hidden)
    memory = source.numel() * features * 4
    made = {name: allocations(call) for name, call in calls.items()}
    # Sizes of a copy per beam of the encoder's outputs, or of their projections.
    copied_sizes = {beam.width * source.numel() * size * 4 for size in (features, hidden)}
    copies_made = {n: sum(size in copied_sizes for size in sizes) for n, sizes in made.items()}
    result = {
        "sentences": len(texts),
        "beam": beam.width,
        "source_steps": width,
        "same_translations": int(same.sum()),
        "memory_bytes": memory,
        "largest_allocation_bytes": {name: max(sizes) for name, sizes in made.items()},
        "allocated_bytes": {name: sum(sizes) for name, sizes in made.items()},
        "copies_per_beam": copies_made,
        "seconds": timings.packed(),
        "copies_over_queries": asdict(timings.ratio("copies", "queries")),
        "settings": asdict(translator.settings),
    }
    times = {name: f"{1e3 * timings.time(name).median:.0f} ms" for name in calls}
    print(
        f"{len(texts)} sentences, {width} source steps, beam {beam.width}: queries "
        f"{times['queries']}, copies {times['copies']} "
        f"({result['copies_over_queries']['median']:.2f}x), greedy {times['greedy']}; "
        f"{result['same_translations']} of {len(texts)} translations the same\n"
        f"allocations as large as {beam.width} copies of the memory ({memory / 1e6:.2f} MB): "
        f"queries {copies_made['queries']}, copies {copies_made['copies']}"
    )
    return result


def score_models(folders: list[Path], sentences: tuple[str, ...]) -> dict[str, Any]:
    """Losses, speed, scores and translations of the trained models in some folders."""
    rows = []
    for folder in folders:
        translator, beam = Translator.load(folder), Beam()
        corpus = Corpus.of(translator.text)
        last = checkpoints.load(folder / checkpoints.LAST)
        parts = {
            "held_out": (corpus.parts.test, None),
            "held_out_beam": (corpus.parts.test, beam),
            f"first_{FIRST}": (corpus.pairs[:FIRST], None),
        }
        scores = {}
        for name, (pairs, search) in parts.items():
            translations = translator.translate([source for source, _ in pairs], search)
            scores[name] = {"pairs": len(pairs), **asdict(translator.score(pairs, translations))}
        losses, epochs = last["losses"], translator.settings.epochs
        answers = translator.translate(sentences, beam)
        rows.append(
            {
                "folder": folder.name,
                "file": Path(translator.text.data or "dates").name,
                "settings": asdict(translator.settings),
                "text": asdict(translator.text) | {"data": None},
                "epoch_losses": losses.reshape(epochs, -1).mean(1).tolist(),
                "validations": last["validations"],
                "steps": len(losses),
                "train_seconds": float(last["seconds"].sum()),
                "tokens_per_second": float(last["tokens"].sum() / last["seconds"].sum()),
                "scores": scores,
                "translations": dict(zip(sentences, map(translator.joined, answers), strict=True)),
            }
        )
        _print_scores(rows[-1])
    return {"beam": asdict(Beam()), "rows": rows}


def _print_scores(row: dict[str, Any]) -> None:
    scores, losses = row["scores"], row["epoch_losses"]
    first = scores[f"first_{FIRST}"]
    corpora = [scores[name]["corpus"] for name in ("held_out", "held_out_beam")]
    cells = [
        row["folder"],
        f"{losses[0]:.2f} to {losses[-1]:.2f}",
        f"{min(v['loss'] for v in row['validations']):.3f}",
        *(f"{corpus[score]:.2f}" for score in ("bleu", "chrf") for corpus in corpora),
        *(f"{first[name]:,}" for name in ("bleu_above_0", "bleu_above_08")),
        f"{row['tokens_per_second']:,.0f}",
    ]
    print("| " + " | ".join(cells) + " |")
    for source, answer in row["translations"].items():
        print(f"    {source} -> {answer}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.seq2seq", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="what")
    command = commands.add_parser("backends")
    command.add_argument("data", type=Path, nargs="?", help="file of pairs; else made-up dates")
    command.add_argument("--steps", type=int, default=100)
    command.add_argument("--hidden", type=int, nargs="+", default=HIDDEN)
    other = commands.add_parser("beam")
    other.add_argument("model", type=Path, help="a folder that train wrote")
    other.add_argument("--seconds", type=float, default=10.0, help="for the timing")
    scores = commands.add_parser("scores")
    scores.add_argument("models", type=Path, nargs="+", help="folders that train wrote")
    scores.add_argument("--sentences", nargs="+", default=COURSE_SENTENCES)
    for each in (command, other, scores):
        each.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    if options.what == "backends":
        figures = compare_backends(options.data, options.steps, tuple(options.hidden))
    elif options.what == "scores":
        figures = score_models(options.models, tuple(options.sentences))
    else:
        figures = compare_beams(options.model, options.seconds)
    save(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
