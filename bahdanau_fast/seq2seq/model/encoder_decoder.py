"""Interfaces and encoder with the names, arguments and state_dict keys of the course.

Sizes: B batch, T steps, Tk source length, E embedding, H hidden units, L layers.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from bahdanau_fast import checks

Hidden: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""The state of a recurrent net: (L,B,H), or for an LSTM a pair (h, c) of those."""


class Encoder(nn.Module):
    """Base of encoders; a subclass defines ``forward(X, *args)``."""

    def forward(self, X: Tensor, *args: Any) -> Any:
        """Encode tokens (B,T)."""
        raise NotImplementedError(f"{type(self).__name__} must define forward(X, *args)")


class Decoder(nn.Module):
    """Base of decoders; a subclass defines ``init_state`` and ``forward(X, state)``."""

    def init_state(self, enc_outputs: Any, *args: Any) -> Any:
        """Make the first state from the outputs of the encoder."""
        raise NotImplementedError(f"{type(self).__name__} must define init_state(enc_outputs)")

    def forward(self, X: Tensor, state: Any) -> Any:
        """Decode tokens (B,T) from a state."""
        raise NotImplementedError(f"{type(self).__name__} must define forward(X, state)")


class AttentionDecoder(Decoder):
    """A decoder with attention weights."""

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
        """Teacher forcing: source and target are given.

        Args:
            enc_X: (B,Tk) source tokens.
            dec_X: (B,T) target tokens, shifted right by a <bos>.
            *args: ``enc_valid_lens``, (B,) or None.

        Returns:
            What the decoder returns: logits (B,T,vocab) and its last state.
        """
        enc_outputs = self.encoder(enc_X, *args)
        return self.decoder(dec_X, self.decoder.init_state(enc_outputs, *args))


def recurrent(
    cell: str,
    input_size: int,
    num_hiddens: int,
    num_layers: int,
    dropout: float,
    bidirectional: bool = False,
) -> nn.GRU | nn.LSTM:
    """A GRU or LSTM; arguments as for :class:`Seq2SeqEncoder`."""
    if cell not in ("gru", "lstm"):
        checks.reject(ValueError, "cell", "be 'gru' or 'lstm'", repr(cell))
    checks.probability("dropout", dropout)
    kind = nn.GRU if cell == "gru" else nn.LSTM
    # Dropout is between layers: with a single layer PyTorch would warn.
    options = {"dropout": dropout if num_layers > 1 else 0.0, "bidirectional": bidirectional}
    return kind(input_size, num_hiddens, num_layers, **options)


class Seq2SeqEncoder(Encoder):
    """Embedding and a recurrent net over the source.

    A bidirectional one returns both directions concatenated, as in Bahdanau, Cho and Bengio 2014,
    and the decoder starts from ``tanh(W h)`` of the last state of the backward direction, in every
    layer (their section A.2.2).

    With the course's arguments its weights after ``torch.manual_seed``, and after a following
    ``net.apply(init_xavier)``, are those of the course's encoder up to 2022. The later one calls
    ``apply`` in its constructor; here the caller does.

    Args:
        vocab_size: number of source tokens.
        embed_size: size of an embedding, E.
        num_hiddens: number of hidden units, H.
        num_layers: number of layers, L.
        dropout: between the layers, in training.
        cell: "gru" or "lstm".
        bidirectional: read the source from both ends; outputs have 2H features.
        embed_dropout: on the embeddings, in training.
        packed: skip padding, so that the outputs of a text do not depend on its batch. The course's
            encoder reads padding: leave ``packed`` off for the course's checkpoints.

    Attributes:
        output_size: features of the outputs.

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
        *,
        bidirectional: bool = False,
        embed_dropout: float = 0,
        packed: bool = False,
    ) -> None:
        super().__init__()
        checks.probability("embed_dropout", embed_dropout)
        self.embed_dropout = nn.Dropout(embed_dropout)
        self.embedding = nn.Embedding(vocab_size, embed_size)
        self.rnn = recurrent(cell, embed_size, num_hiddens, num_layers, dropout, bidirectional)
        self.packed = packed
        self.output_size = num_hiddens * (1 + bidirectional)
        if bidirectional:
            parts = 2 if cell == "lstm" else 1
            self.bridge = nn.ModuleList(nn.Linear(num_hiddens, num_hiddens) for _ in range(parts))
        # The course's later encoders wrap the recurrent net in another module.
        hook = partial(rename, "rnn.rnn.", "rnn.")
        self.register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]

    def forward(self, X: Tensor, *args: Any) -> tuple[Tensor, Hidden]:
        """Read a source.

        Args:
            X: (B,T) tokens.
            *args: the valid lengths (B,), all at least 1, or None; used by a packed encoder.

        Returns:
            Outputs (T,B,output_size) of the top layer, and the state (L,B,H) to decode from.
        """
        embedded = self.embed_dropout(self.embedding(X)).transpose(0, 1)
        lens = args[0] if args else None
        if self.packed and lens is not None and X.numel():
            sequence = pack_padded_sequence(embedded, lens.cpu(), enforce_sorted=False)
            outputs, hidden = self.rnn(sequence)
            outputs, _ = pad_packed_sequence(outputs, total_length=X.shape[1])
        else:
            outputs, hidden = self.rnn(embedded)
        if not self.rnn.bidirectional:
            return outputs, hidden
        parts = hidden if isinstance(hidden, tuple) else (hidden,)
        # PyTorch stores the directions of a layer one after the other, the backward one second.
        pairs = zip(self.bridge, parts, strict=True)
        first = [torch.tanh(layer(part[1::2])) for layer, part in pairs]
        return outputs, first[0] if len(first) == 1 else (first[0], first[1])


def rename(
    old: str, new: str, module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any
) -> None:
    """Before a module loads a state: keys that begin with ``old`` shall begin with ``new``."""
    for key in [key for key in state_dict if key.startswith(prefix + old)]:
        state_dict[prefix + new + key.removeprefix(prefix + old)] = state_dict.pop(key)


def init_xavier(module: nn.Module) -> None:
    """Xavier-uniform weights for linear and recurrent layers; use as ``net.apply(init_xavier)``.

    A Linear, GRU or LSTM is changed in place; biases stay as they are.
    """
    if isinstance(module, (nn.Linear, nn.GRU, nn.LSTM)):
        for name, parameter in module.named_parameters(recurse=False):
            if "weight" in name:
                nn.init.xavier_uniform_(parameter)
