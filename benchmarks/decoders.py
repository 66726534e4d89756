"""The course's decoder by everybody who computes its attention: training and greedy decoding.

Each of ``DECODERS`` gets the same batch, weights and loss. A training step is forward, loss,
backward, clipping and Adam, encoder and output layer included; greedy decoding feeds the most
likely token back. :class:`Judge` compares loss, gradients and tokens with the own module's.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bahdanau_fast as bf
from bahdanau_fast import parity, seq2seq
from bahdanau_fast.seq2seq.data.pairs import BOS, UNK

from .contestants import CourseAttention

OWN, DROP_IN, FUSE, OURS, NONE = "own module", "drop-in", "fuse", "AttentionGRU", "no attention"
TASKS = {"train": "training step", "decode": "greedy decode"}
# Share of the largest element that an error may be, beside four times the own module's.
PARITY = {False: 1e-3, True: 2.0**-7}


@dataclass(frozen=True)
class Setting:
    batch: int
    source: int
    target: int
    embed: int
    hidden: int
    layers: int
    vocab: int
    bf16: bool = False


class _CourseDecoder(seq2seq.Seq2SeqAttentionDecoder):
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


def _course_greedy(model: Any, source: Tensor, lens: Tensor, steps: int) -> tuple[Tensor, Any]:
    """The course's prediction, of a whole batch: tokens (B,T) and the last state."""
    state = model.decoder.init_state(model.encoder(source, lens), lens)
    tokens = [source.new_full((len(source), 1), BOS)]
    for _ in range(steps):
        logits, state = model.decoder(tokens[-1], state)
        tokens.append(logits.argmax(2))
    return torch.cat(tokens[1:], 1), state


# Make a decoder from vocabulary, embedding, hidden units and layers.
DECODERS: dict[str, Callable[..., nn.Module]] = {
    OWN: partial(_CourseDecoder, CourseAttention),
    DROP_IN: partial(_CourseDecoder, bf.AdditiveAttention),
    FUSE: partial(_CourseDecoder, CourseAttention),
    # What AttentionGRU does, all steps in one operator, and with greedy decoding in another.
    OURS: seq2seq.Seq2SeqAttentionDecoder,
    NONE: seq2seq.Seq2SeqDecoder,
}


class Work:
    """One of the decoders behind an encoder, with a batch; no sentence ends before its time."""

    def __init__(
        self, name: str, setting: Setting, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self.setting, self.device = setting, torch.device(device)
        make, self._search = DECODERS[name], seq2seq.greedy if name == OURS else _course_greedy
        sizes = (setting.vocab, setting.embed, setting.hidden, setting.layers)
        self.model: Any = seq2seq.EncoderDecoder(seq2seq.Seq2SeqEncoder(*sizes), make(*sizes))
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

    def autocast(self, cache: bool = True) -> torch.autocast:
        bf16 = self.setting.bf16
        return torch.autocast(self.device.type, torch.bfloat16, enabled=bf16, cache_enabled=cache)

    def forward(self, target: Tensor) -> Tensor:
        with self.autocast():
            logits: Tensor = self.model(self.source, target, self.source_lens)[0]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def gradients(self) -> dict[str, Tensor]:
        """Of all parameters, and the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        logits = self.forward(self.target)
        loss = seq2seq.masked_cross_entropy(logits, self.target, self.target_lens).sum()
        loss.backward()
        return {"loss": loss.detach(), **{n: p.grad for n, p in self.model.named_parameters()}}

    def train(self) -> Tensor:
        loss = self.gradients()["loss"]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss

    @torch.no_grad()
    def decode(self) -> Tensor:
        """Tokens (B,T)."""
        with self.autocast():
            steps = self.setting.target
            tokens: Tensor = self._search(self.model, self.source, self.source_lens, steps)[0]
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
        for _ in range(4):  # fuse looks at the first calls
            self._result(work)
        return worst(self._result(work), self._own, self._want, self._bf16)
