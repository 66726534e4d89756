"""Encoder and decoder with the names, arguments and state_dict keys of the course.

Sizes: B batch, T steps, Tk source length, E embedding, H hidden units, L layers, K queries per
sentence (one in training, the beams in a beam search).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from bahdanau_fast import checks
from bahdanau_fast.memory import Memory
from bahdanau_fast.modules import AdditiveAttention

__all__ = [
    "AttentionDecoder",
    "Decoder",
    "Encoder",
    "EncoderDecoder",
    "Hidden",
    "Seq2SeqAttentionDecoder",
    "Seq2SeqEncoder",
    "State",
    "init_xavier",
]

Hidden: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""What a recurrent net carries on: (L,B,H), or for an LSTM a pair (h, c) of those."""

State: TypeAlias = list[Any]
"""A decoder state ``[enc_outputs (B,Tk,H), hidden, enc_valid_lens]``."""

_CELLS: dict[str, type[nn.GRU] | type[nn.LSTM]] = {"gru": nn.GRU, "lstm": nn.LSTM}


class Encoder(nn.Module):
    """What reads a source: a subclass gives ``forward(X, *args)``."""

    def forward(self, X: Tensor, *args: Any) -> Any:
        """Encode tokens (B,T)."""
        raise NotImplementedError(f"{type(self).__name__} must define forward(X, *args)")


class Decoder(nn.Module):
    """What writes a target: a subclass gives ``init_state`` and ``forward(X, state)``."""

    def init_state(self, enc_outputs: Any, *args: Any) -> Any:
        """Make the first state out of what the encoder returned."""
        raise NotImplementedError(f"{type(self).__name__} must define init_state(enc_outputs)")

    def forward(self, X: Tensor, state: Any) -> Any:
        """Decode tokens (B,T) from a state."""
        raise NotImplementedError(f"{type(self).__name__} must define forward(X, state)")


class AttentionDecoder(Decoder):
    """A decoder that shows where it looked."""

    @property
    def attention_weights(self) -> Any:
        """Weights of the last call."""
        raise NotImplementedError(f"{type(self).__name__} must define attention_weights")


class EncoderDecoder(nn.Module):
    """An encoder and a decoder, trained together.

    Args:
        encoder: called as ``encoder(enc_X, enc_valid_lens)``.
        decoder: ``init_state(enc_outputs, enc_valid_lens)``, then called as ``(dec_X, state)``.
    """

    def __init__(self, encoder: Encoder, decoder: Decoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def forward(self, enc_X: Tensor, dec_X: Tensor, *args: Any) -> Any:
        """Teacher forcing: both sides are given.

        Args:
            enc_X: (B,Tk) source tokens.
            dec_X: (B,T) target tokens, shifted right by a <bos>.
            *args: ``enc_valid_lens``, (B,) or None.

        Returns:
            What the decoder returns: logits (B,T,vocab) and its last state.
        """
        enc_outputs = self.encoder(enc_X, *args)
        return self.decoder(dec_X, self.decoder.init_state(enc_outputs, *args))


def _recurrent(
    cell: str, input_size: int, num_hiddens: int, num_layers: int, dropout: float
) -> nn.GRU | nn.LSTM:
    if cell not in _CELLS:
        known = " or ".join(repr(name) for name in _CELLS)
        checks.reject(ValueError, "cell", f"be {known}", repr(cell))
    checks.probability("dropout", dropout)
    # Dropout sits between layers: with one there is no place for it, and PyTorch warns.
    between = dropout if num_layers > 1 else 0.0
    return _CELLS[cell](input_size, num_hiddens, num_layers, dropout=between)


class Seq2SeqEncoder(Encoder):
    """Embedding and a recurrent net over the source.

    Args:
        vocab_size: number of source tokens.
        embed_size: E.
        num_hiddens: H.
        num_layers: L.
        dropout: between the layers, in training.
        cell: "gru" or "lstm".

    Raises:
        ValueError: an unknown cell, or a dropout outside [0, 1].

    >>> outputs, hidden = Seq2SeqEncoder(10, 8, 16, 2)(torch.zeros(4, 7, dtype=torch.long))
    >>> tuple(outputs.shape), tuple(hidden.shape)
    ((7, 4, 16), (2, 4, 16))
    """

    def __init__(
        self,
        vocab_size: int,
        embed_size: int,
        num_hiddens: int,
        num_layers: int,
        dropout: float = 0,
        cell: str = "gru",
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embed_size)
        self.rnn = _recurrent(cell, embed_size, num_hiddens, num_layers, dropout)

    def forward(self, X: Tensor, *args: Any) -> tuple[Tensor, Hidden]:
        """Read a source.

        Args:
            X: (B,T) tokens.
            *args: ignored; the course passes the valid lengths.

        Returns:
            Outputs (T,B,H) of the top layer, and the last state of every layer.
        """
        outputs, hidden = self.rnn(self.embedding(X).transpose(0, 1))
        return outputs, hidden


class Seq2SeqAttentionDecoder(AttentionDecoder):
    """A recurrent decoder that looks at the source through additive attention at every step.

    The query is the top layer's hidden state; the context it gives goes, in front of the token's
    embedding, into the recurrent net (Bahdanau, Cho and Bengio 2014). The keys are projected once
    per call, not once per step.

    Args:
        vocab_size: number of target tokens.
        embed_size: E.
        num_hiddens: H, of the encoder too.
        num_layers: L, of the encoder too.
        dropout: on the attention weights and between the layers, in training.
        cell: "gru" or "lstm".

    Raises:
        ValueError: an unknown cell, or a dropout outside [0, 1].

    >>> encoder, decoder = Seq2SeqEncoder(10, 8, 16, 2), Seq2SeqAttentionDecoder(10, 8, 16, 2)
    >>> X = torch.zeros(4, 7, dtype=torch.long)
    >>> output, state = decoder(X, decoder.init_state(encoder(X), None))
    >>> tuple(output.shape), len(state), tuple(state[0].shape), len(state[1])
    ((4, 7, 10), 3, (4, 7, 16), 2)
    """

    def __init__(
        self,
        vocab_size: int,
        embed_size: int,
        num_hiddens: int,
        num_layers: int,
        dropout: float = 0,
        cell: str = "gru",
    ) -> None:
        super().__init__()
        self.attention = AdditiveAttention(num_hiddens, num_hiddens, num_hiddens, dropout)
        self.embedding = nn.Embedding(vocab_size, embed_size)
        self.rnn = _recurrent(cell, embed_size + num_hiddens, num_hiddens, num_layers, dropout)
        self.dense = nn.Linear(num_hiddens, vocab_size)
        self._attention_weights: list[Tensor] = []

    def init_state(
        self, enc_outputs: tuple[Tensor, Hidden], enc_valid_lens: Tensor | None = None, *args: Any
    ) -> State:
        """Make the first state.

        Args:
            enc_outputs: outputs (Tk,B,H) and hidden state of the encoder.
            enc_valid_lens: (B,) or None.
            *args: ignored.

        Returns:
            ``[outputs (B,Tk,H), hidden, enc_valid_lens]``.
        """
        outputs, hidden = enc_outputs
        # Copied into (B,Tk,H) order once: every step reads it.
        return [outputs.transpose(0, 1).contiguous(), hidden, enc_valid_lens]

    def memory(self, state: State) -> Memory:
        """Project the keys of a state, for any number of calls of :meth:`step`."""
        enc_outputs, _, enc_valid_lens = state
        return self.attention.memory(enc_outputs, enc_outputs, enc_valid_lens)

    def step(
        self, embedded: Tensor, hidden: Hidden, memory: Memory
    ) -> tuple[Tensor, Tensor, Hidden]:
        """Decode one token of every sequence; K sequences may share one source.

        Args:
            embedded: (B*K,E), the K sequences of one source side by side.
            hidden: (L,B*K,H), for an LSTM a pair of those.
            memory: of the B sources.

        Returns:
            Features (B*K,H) for ``dense``, attention weights (B,K,Tk), the new hidden state.
        """
        top = (hidden[0] if isinstance(hidden, tuple) else hidden)[-1]
        queries = top.reshape(memory.values.shape[0], -1, top.shape[-1])
        context = self.attention.attend(queries, memory).reshape(top.shape[0], -1)
        weights = self.attention.attention_weights
        assert weights is not None  # attend has just set them
        inputs = torch.cat((context, embedded), dim=-1).unsqueeze(0)
        features, hidden = self.rnn(inputs, hidden)
        return features.squeeze(0), weights, hidden

    def forward(self, X: Tensor, state: State) -> tuple[Tensor, State]:
        """Decode given tokens.

        Args:
            X: (B,T) tokens, the first usually <bos>.
            state: from :meth:`init_state` or from the previous call.

        Returns:
            Logits (B,T,vocab) and the state ``[enc_outputs, hidden, enc_valid_lens]``.
        """
        enc_outputs, hidden, enc_valid_lens = state
        memory = self.memory(state)
        features, weights = [], []
        for embedded in self.embedding(X).unbind(1):
            feature, looked, hidden = self.step(embedded, hidden, memory)
            features.append(feature)
            weights.append(looked)
        self._attention_weights = weights
        return self.dense(torch.stack(features, 1)), [enc_outputs, hidden, enc_valid_lens]

    @property
    def attention_weights(self) -> list[Tensor]:
        """One (B,1,Tk) per step of the last call."""
        return self._attention_weights

    def __getstate__(self) -> dict[str, Any]:
        # Weights inside an autograd graph can be neither copied nor pickled.
        detached = [weights.detach() for weights in self._attention_weights]
        return {**self.__dict__, "_attention_weights": detached}


def init_xavier(module: nn.Module) -> None:
    """Xavier-uniform weights for linear and recurrent layers; use as ``net.apply(init_xavier)``.

    Args:
        module: changed in place when it is a Linear, GRU or LSTM; biases stay as they are.
    """
    if isinstance(module, (nn.Linear, nn.GRU, nn.LSTM)):
        for name, parameter in module.named_parameters(recurse=False):
            if "weight" in name:
                nn.init.xavier_uniform_(parameter)
