"""The demo: learn to read dates, then show that the fused op changes only the speed."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import random
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch

import bahdanau_fast
from bahdanau_fast import backends
from bahdanau_fast.modules import AdditiveAttention
from bahdanau_fast.seq2seq.cli import cores, plots
from bahdanau_fast.seq2seq.cli.actions import check_folder, note
from bahdanau_fast.seq2seq.data import dates
from bahdanau_fast.seq2seq.data.pairs import Pairs
from bahdanau_fast.seq2seq.model.settings import Settings, build_model
from bahdanau_fast.seq2seq.search.translator import Translation, translate
from bahdanau_fast.seq2seq.training.trainer import Trainer, all_batches, total_steps, train

EXACT_MATCH_GOAL, LOSS_GOAL, VERDICTS = 0.95, 1e-3, ("FAIL", "PASS")


@dataclasses.dataclass(frozen=True)
class DemoSizes:
    """Pairs for training and test, and training steps that the reference backend repeats."""

    train: int = 20_000
    held_out: int = 1_000
    compared_steps: int = 100


QUICK = DemoSizes(train=2_000, held_out=200, compared_steps=10)


def run(out: Path, settings: Settings, sizes: DemoSizes, overwrite: bool = False) -> bool:
    """True if exact match (not with smaller sizes) and loss agreement reached their goals."""
    plots.require_matplotlib()
    files = () if overwrite else ("attention.png", "loss.png", "demo.json")
    check_folder(out, "demo", files, "--overwrite replaces it")
    out.mkdir(parents=True, exist_ok=True)
    full, fused = sizes == DemoSizes(), backends.resolve(torch.device("cpu"))
    if not full:
        print("a smoke run: too small to learn dates, so its translations are not judged")
    print(f"attention backend: {fused}")
    if fused == "reference":
        print("the fused backend is not there: this run compares the reference with itself")

    examples = dates.generate(sizes.train + sizes.held_out, settings.seed)
    held_out = examples[sizes.train :]
    pairs = Pairs.of([(example.text, example.iso) for example in examples[: sizes.train]])
    model = build_model(pairs, settings)
    count, learnt = sum(p.numel() for p in model.parameters()), len(pairs)
    print(f"{learnt:,} dates to learn from, {len(held_out):,} held out; {count:,} parameters")
    note(cores.busy())
    start = time.perf_counter()
    history = train(model, pairs, settings)
    trained = time.perf_counter() - start
    print(f"trained in {trained:.1f} s, {history.tokens_per_second:,.0f} target tokens/s\n")

    texts, vocabs = [example.text for example in held_out], (pairs.source_vocab, pairs.target_vocab)
    steps_of_both = pairs.tensors.source.shape[1], pairs.tensors.target.shape[1]
    translations = translate(model, texts, *vocabs, *steps_of_both)
    exact = _report_translations(translations, held_out, settings.seed, full)

    steps = min(sizes.compared_steps, len(history.losses))
    difference, compared = _compare(pairs, settings, fused, history.losses[:steps])
    agree = difference <= LOSS_GOAL
    good = exact >= EXACT_MATCH_GOAL or not full
    goal = f"goal {EXACT_MATCH_GOAL:.0%}" if full else "not judged in a smoke run"
    print(f"{VERDICTS[good] if full else '----'}  exact match {exact:.1%} ({goal})")
    said = f"largest relative difference of the losses over {steps} steps: {difference:.1e}"
    print(f"{VERDICTS[agree]}  {said} (goal {LOSS_GOAL:.0e})")

    plots.save(_alignments(translations, held_out), out / "attention.png")
    plots.save(plots.training_curves(history.losses, []), out / "loss.png")
    figures = {
        "exact_match": exact,
        "train_seconds": trained,
        "tokens_per_second": history.tokens_per_second,
        "backend": fused,
        **compared,
        "passed": good and agree,
        "settings": dataclasses.asdict(settings),
        "sizes": dataclasses.asdict(sizes),
        "versions": _versions(),
        "losses": history.losses,
    }
    (out / "demo.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(f"wrote attention.png, loss.png and demo.json to {out}{os.sep}")
    return good and agree


def _versions() -> dict[str, Any]:
    return {
        "bahdanau_fast": bahdanau_fast.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.platform(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _compare(
    pairs: Pairs, settings: Settings, fused: str, losses: Sequence[float]
) -> tuple[float, dict[str, Any]]:
    """How far the reference's losses are from these, and what steps took with each backend."""
    compared = compare_training(pairs, settings, [fused, "reference"], len(losses))
    seconds = {name: median(trainer.history.seconds) for name, trainer in compared.items()}
    alone = time_attention(pairs, settings, list(seconds), len(losses))
    print("a training step, and its attention alone, step by step, taking turns (medians):")
    for name, taken in seconds.items():
        print(f"  {name:<12}{taken * 1e3:>9.2f} ms{alone[name] * 1e3:>9.2f} ms")
    print("attention is a part of a step, small on short dates; it grows with the source")
    difference = relative_difference(losses, compared["reference"].history.losses)
    return difference, {
        "compared_steps": len(losses),
        "loss_max_relative_difference": difference,
        "median_step_seconds": seconds,
        "median_attention_seconds": alone,
    }


def compare_training(
    pairs: Pairs, settings: Settings, names: Sequence[str], steps: int
) -> dict[str, Trainer]:
    """Train one model per backend from the same seed on the same batches.

    They take turns at every step, in alternating order, so that other load on the machine affects
    all of them alike. A repeated name is run once.
    """
    schedule = total_steps(pairs, settings)
    trainers = {name: Trainer(build_model(pairs, settings), settings, schedule) for name in names}
    order = list(trainers.items())
    for _, batch in islice(all_batches(pairs, settings), steps):
        for name, trainer in order:
            with backends.use(name):
                trainer.step(batch)
        order.reverse()
    return trainers


def time_attention(
    pairs: Pairs, settings: Settings, names: Sequence[str], steps: int
) -> dict[str, float]:
    """Median seconds that training steps attend, forward and backward, by backend, in turns."""
    size = settings.num_hiddens
    attention = AdditiveAttention(size, size, size)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _, batch in islice(all_batches(pairs, settings), steps):
        keys = torch.randn(*batch.source.shape, size, requires_grad=True)
        queries = torch.randn(*batch.target.T.shape, size, requires_grad=True)
        for name in names:
            with backends.use(name):
                start = time.perf_counter()
                memory = attention.memory(keys, valid_lens=batch.source_lens)
                contexts = [attention.attend(query, memory) for query in queries]
                inputs = [queries, keys, *attention.parameters()]
                torch.autograd.grad(torch.stack(contexts).sum(), inputs)
                times[name].append(time.perf_counter() - start)
    return {name: median(seconds) for name, seconds in times.items()}


def relative_difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """The largest ``|a - b| / |b|`` of two loss curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, others, strict=True))


def _report_translations(
    translations: Sequence[Translation], examples: Sequence[dates.Example], seed: int, judged: bool
) -> float:
    """Print ten translations if they are judged; return the share that is exactly right."""
    answers = ["".join(translation.tokens) for translation in translations]
    right = [a == example.iso for a, example in zip(answers, examples, strict=True)]
    exact = sum(right) / len(right)
    if not judged:
        return exact
    print("ten held-out dates:")
    for i in sorted(random.Random(seed).sample(range(len(examples)), min(10, len(examples)))):
        verdict = "right" if right[i] else f"WRONG, is {examples[i].iso}"
        print(f"  {examples[i].text} -> {answers[i]}  {verdict}")
    print(f"exact match on {len(right):,} held-out dates: {exact:.1%}\n")
    return exact


def _alignments(translations: Sequence[Translation], examples: Sequence[dates.Example]) -> Any:
    """One long example per language with month names, preferably a correct one."""
    best: dict[str, tuple[int, Translation]] = {}
    for translation, example in zip(translations, examples, strict=True):
        right = "".join(translation.tokens) == example.iso
        # Long, but not the longest, to stay readable; correct ones first.
        rank = 100 * right - abs(len(translation.source) - 26)
        if example.language not in best or rank > best[example.language][0]:
            best[example.language] = (rank, translation)
    named = [language for language in dates.LANGUAGES if language in best.keys() - {"numeric"}]
    shown = [language for language in named if plots.drawable("".join(best[language][1].source))]
    under = "source characters (· is a space)"
    if undrawable := [language for language in named if language not in shown]:
        under += f"; no font here draws {' and '.join(undrawable)}"
    heading = "Where each character of the ISO date looked in the source"
    return plots.alignments([best[language][1] for language in shown], shown, heading, under)
