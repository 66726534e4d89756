"""The course's decoder by everybody who computes its attention: training, inference, decoding.

``python -m benchmarks.decoders`` runs each of ``DECODERS`` on the same batches and weights, in
turns. A step is forward, loss, backward, clipping and Adam, encoder and output layer included;
inference is the forward with given targets; greedy decoding feeds the most likely token back. The
course's loss, which keeps the vocabulary in the middle and takes longer, goes with the course's
loop. Loss, gradients and tokens are checked first. ``--bf16`` has the forward under autocast;
``--json OUT`` keeps the figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bahdanau_fast as bf
from bahdanau_fast import parity
from bahdanau_fast.seq2seq import (
    EncoderDecoder,
    Seq2SeqAttentionDecoder,
    Seq2SeqDecoder,
    Seq2SeqEncoder,
    greedy,
    masked_cross_entropy,
)
from bahdanau_fast.seq2seq.data.pairs import BOS, UNK

from .contestants.baselines import CourseAttention
from .tables import markdown, spread_text
from .timing.machine import save
from .timing.measure import GpuCall, allocated_growth, interleave

OWN, DROP_IN, FUSE, STEPS, OURS = "own module", "drop-in", "fuse", "step by step", "AttentionGRU"
TASKS = {"train": "training step", "infer": "inference", "decode": "greedy decode"}
# Share of the largest element that an error may be, beside four times the own module's.
PARITY = {False: 1e-3, True: 2.0**-7}


@dataclass(frozen=True)
class Setting:
    """One model and batch."""

    name: str
    batch: int
    source: int
    target: int
    embed: int
    hidden: int
    layers: int
    vocab: int
    bf16: bool = False


SETTINGS = (
    Setting("hidden 512", 64, 50, 50, 256, 512, 1, 5000),
    Setting("hidden 256", 64, 30, 30, 256, 256, 2, 5000),
    Setting("hidden 32", 64, 10, 10, 32, 32, 2, 200),
)


class _CourseDecoder(Seq2SeqAttentionDecoder):
    """The course's loop: asks its attention, which projects the keys, at each step."""

    def __init__(self, attention: Callable[..., nn.Module], *sizes: int) -> None:
        super().__init__(*sizes)
        self.attention = attention(*[self.rnn.hidden_size] * 3)

    def forward(self, X: Tensor, state: Any) -> tuple[Tensor, Any]:
        enc_outputs, hidden, lens = state
        outputs = []
        for embedded in self.embedding(X).permute(1, 0, 2):
            query = hidden[-1].unsqueeze(1)
            context = self.attention(query, enc_outputs, enc_outputs, lens)
            inputs = torch.cat((context, embedded.unsqueeze(1)), dim=-1)
            out, hidden = self.rnn(inputs.permute(1, 0, 2), hidden)
            outputs.append(out)
        logits = self.dense(torch.cat(outputs, dim=0))
        return logits.permute(1, 0, 2), [enc_outputs, hidden, lens]


class _SteppedDecoder(Seq2SeqAttentionDecoder):
    """Ours step by step: a decoder that overrides ``step`` does not take the operator."""

    def step(self, embedded: Tensor, hidden: Any, memory: Any) -> Any:
        return super().step(embedded, hidden, memory)


def _course_loss(logits: Tensor, labels: Tensor, valid_lens: Tensor) -> Tensor:
    """The course's masked cross-entropy (B,)."""
    weights = torch.arange(labels.shape[1], device=labels.device) < valid_lens[:, None]
    unweighted = F.cross_entropy(logits.permute(0, 2, 1), labels, reduction="none")
    return (unweighted * weights.float()).mean(dim=1)


def _course_greedy(model: Any, source: Tensor, lens: Tensor, steps: int) -> tuple[Tensor, Any]:
    """The course's prediction, of a whole batch: tokens (B,T) and the last state."""
    state = model.decoder.init_state(model.encoder(source, lens), lens)
    tokens = [source.new_full((len(source), 1), BOS)]
    for _ in range(steps):
        logits, state = model.decoder(tokens[-1], state)
        tokens.append(logits.argmax(2))
    return torch.cat(tokens[1:], 1), state


class Kind(NamedTuple):
    """Makes a decoder from vocabulary, embedding, hidden units and layers; its loss and search."""

    make: Callable[..., nn.Module]
    loss: Callable[..., Tensor] = masked_cross_entropy
    search: Callable[..., Any] = greedy


_COURSE = (_course_loss, _course_greedy)
DECODERS = {
    OWN: Kind(partial(_CourseDecoder, CourseAttention), *_COURSE),
    "no attention": Kind(Seq2SeqDecoder, _course_loss),
    "no attention, our loss": Kind(Seq2SeqDecoder),
    DROP_IN: Kind(partial(_CourseDecoder, bf.AdditiveAttention), *_COURSE),
    FUSE: Kind(partial(_CourseDecoder, CourseAttention), *_COURSE),
    STEPS: Kind(_SteppedDecoder),
    # What AttentionGRU does, all steps in one operator, and with greedy decoding in another.
    OURS: Kind(Seq2SeqAttentionDecoder),
}


class Work:
    """One of the decoders behind an encoder, with a batch; no sentence ends before its time."""

    def __init__(
        self, name: str, setting: Setting, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self.kind, self.setting, self.device = DECODERS[name], setting, torch.device(device)
        sizes = (setting.vocab, setting.embed, setting.hidden, setting.layers)
        self.model: Any = EncoderDecoder(Seq2SeqEncoder(*sizes), self.kind.make(*sizes))
        self.report = bf.fuse(self.model.decoder) if name == FUSE else None
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for _, weight in sorted(self.model.named_parameters()):  # of all kinds the same
                weight.uniform_(-1, 1, generator=draw).mul_((3 / weight.shape[-1]) ** 0.5)
            self.model.decoder.dense.bias[:UNK] = -100.0
        self.model.to(self.device, dtype)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        draw.manual_seed(1)  # some kinds have drawn less
        self.source, self.source_lens = self._texts(setting.source, draw)
        self.target, self.target_lens = self._texts(setting.target, draw)

    def _texts(self, length: int, draw: torch.Generator) -> list[Tensor]:
        batch, words = self.setting.batch, (UNK, self.setting.vocab)
        wanted = (*words, (batch, length)), (length // 2, length + 1, (batch,))
        return [torch.randint(*each, generator=draw).to(self.device) for each in wanted]

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.setting.bf16)

    def forward(self, target: Tensor) -> Tensor:
        """Logits."""
        with self._autocast():
            logits: Tensor = self.model(self.source, target, self.source_lens)[0]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def gradients(self) -> dict[str, Tensor]:
        """Of all parameters, and the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.kind.loss(self.forward(self.target), self.target, self.target_lens).sum()
        loss.backward()
        return {"loss": loss.detach(), **{n: p.grad for n, p in self.model.named_parameters()}}

    def train(self) -> Tensor:
        loss = self.gradients()["loss"]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss

    @torch.no_grad()
    def infer(self) -> Tensor:
        return self.forward(self.target)

    @torch.no_grad()
    def decode(self) -> Tensor:
        """Tokens (B,T)."""
        with self._autocast():
            steps = self.setting.target
            tokens: Tensor = self.kind.search(self.model, self.source, self.source_lens, steps)[0]
        return tokens


def worst(
    found: dict[str, Tensor], own: dict[str, Tensor], exact: dict[str, Tensor], bf16: bool = False
) -> float:
    """The largest error over what is allowed: beside the own module's, a share of the result."""
    return max(
        parity.error(found[name], x)
        / (4 * parity.error(own[name], x) + PARITY[bf16] * float(x.abs().max()))
        for name, x in exact.items()
    )


class Judge:
    """What the own module gives, in fp64 and in the dtype of a setting."""

    def __init__(self, setting: Setting, task: str, device: str = "cpu") -> None:
        self._task, self._bf16 = task, setting.bf16
        self._exact = Work(OWN, replace(setting, bf16=False), device, torch.float64)
        self._want = self._result(self._exact)
        self._own = self._result(Work(OWN, setting, device))

    def _result(self, work: Work) -> dict[str, Tensor]:
        if self._task == "train":
            return work.gradients()
        tokens = work.decode()
        with torch.no_grad():
            logits = self._exact.forward(F.pad(tokens[:, :-1], (1, 0), value=BOS))
        # Another token may be as good: 1 where it is.
        below = logits.amax(2) - logits.gather(2, tokens.unsqueeze(2)).squeeze(2)
        return {"tokens": 1 - below / logits.amax(2).abs().max()}

    def worst(self, work: Work) -> float:
        """Of a work's loss and gradients, or of its tokens."""
        for _ in range(2):  # fuse checks itself at the first two calls
            self._result(work)
        return worst(self._result(work), self._own, self._want, self._bf16)


def _peak(call: Callable[[], Any], device: torch.device) -> int:
    """Bytes that a call takes beside what is there."""
    if device.type != "cuda":
        return allocated_growth(call)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def compare(
    setting: Setting, seconds: float, min_rounds: int = 5, device: str = "cpu"
) -> dict[str, Any]:
    """Time and memory of one setting.

    Raises:
        RuntimeError: a decoder with attention gives another loss, gradient or token.
    """
    works = {name: Work(name, setting, device) for name in DECODERS}
    for task in ("train", "decode"):
        judge = Judge(setting, task, device)
        for name in (DROP_IN, FUSE, STEPS, OURS):
            share = judge.worst(works[name])
            if not share <= 1:
                what = f"{TASKS[task]} of {name!r} is wrong by {share:.3g} of what is allowed"
                raise RuntimeError(f"{setting.name}: {what}")
    figures: dict[str, Any] = {"setting": asdict(setting)}
    for task, part in (("train", 1.0), ("infer", 0.5), ("decode", 0.5)):
        calls = {name: GpuCall(getattr(w, task), w.device) for name, w in works.items()}
        figures[task] = interleave(calls, part * seconds, min_rounds).packed()
    return figures | {"peak_bytes": {name: _peak(w.train, w.device) for name, w in works.items()}}


def times(figures: list[dict[str, Any]]) -> list[str]:
    """Time and memory of every decoder, as Markdown."""
    cells, tasks = [], [task for task in TASKS if all(task in row for row in figures)]
    for row in figures:
        for name in row["train"]:
            spreads = (spread_text(row[task][name]) for task in tasks)
            peak = f"{row['peak_bytes'][name] / 1e6:.0f}"
            cells.append([row["setting"]["name"], name, *spreads, peak])
    timed = [f"{TASKS[task]} (ms)" for task in tasks]
    return markdown(["setting", "decoder", *timed, "peak memory (MB)"], cells)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.decoders", description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0, help="of training per setting")
    parser.add_argument("--only", default="", help="settings whose name holds this")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true", help="forward under autocast")
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    chosen = [replace(s, bf16=options.bf16) for s in SETTINGS if options.only in s.name]
    figures = [compare(setting, options.seconds, device=options.device) for setting in chosen]
    print("\n".join(times(figures)))
    save(options.json, {"settings": figures})


if __name__ == "__main__":
    main()
