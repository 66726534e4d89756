"""Decoders with attention, and one without for comparison.

Sizes as in :mod:`encoder_decoder`, and K sequences per source: one in training, the beams in a
beam search.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from bahdanau_fast import checks
from bahdanau_fast.memory import Memory
from bahdanau_fast.modules import AdditiveAttention
from bahdanau_fast.modules.decoder_loop import (
    SpecialTokens,
    attend_step,
    decode_greedily,
    decode_inputs,
)
from bahdanau_fast.modules.dot_product import DotProductAttention
from bahdanau_fast.modules.layers import apply_layer
from bahdanau_fast.seq2seq.data.pairs import BOS, EOS, PAD
from bahdanau_fast.seq2seq.model.encoder_decoder import (
    AttentionDecoder,
    Decoder,
    Hidden,
    recurrent,
    rename,
)

State: TypeAlias = list[Any]
"""A decoder state ``[enc_outputs (B,Tk,features), hidden, enc_valid_lens]``."""


class StepDecoder(Decoder):
    """A decoder that can decode one token of many sequences, as translating needs."""

    embedding: nn.Embedding
    embed_dropout: nn.Dropout
    rnn: nn.GRU | nn.LSTM
    dense: nn.Linear

    def memory(self, state: State) -> Any:
        """What every step reads of the sources, computed once, for any number of sequences."""
        raise NotImplementedError(f"{type(self).__name__} must define memory(state)")

    def step(
        self, embedded: Tensor, hidden: Hidden, memory: Any
    ) -> tuple[Tensor, Tensor | None, Hidden]:
        """Decode one token of every sequence; K sequences may share one source.

        Args:
            embedded: (B*K,E), the K sequences of a source next to each other.
            hidden: (L,B*K,H), for an LSTM a pair of those.
            memory: of the B sources, from :meth:`memory`.

        Returns:
            Features (B*K,H) for ``dense``, attention weights (B,K,Tk) or None for a decoder
            without attention, the new hidden state.
        """
        raise NotImplementedError(f"{type(self).__name__} must define step(embedded, ...)")

    def write(
        self, hidden: Hidden, memory: Any, banned_tokens: list[int], max_steps: int
    ) -> tuple[Tensor, Tensor] | None:
        """Greedy decoding in one call: tokens (B,T), <pad> behind <eos>, and weights (B,T,Tk).

        The arguments are those of :meth:`step`, without a first token; tokens ``banned_tokens`` are
        never written, T is at most ``max_steps``. None: the caller has to decode step by step.
        """
        return None


class Seq2SeqAttentionDecoder(StepDecoder, AttentionDecoder):
    """A recurrent decoder that attends to the source at every step.

    The query is the top layer's hidden state; the recurrent net reads the context, followed by the
    token's embedding (Bahdanau, Cho and Bengio 2014). The keys are projected once per call.

    With the course's arguments its weights after ``torch.manual_seed`` are those of the course's
    decoder up to 2022; the later one draws those of attention and output at the first call. Dropout
    masks differ from the course's.

    Args:
        vocab_size: number of target tokens.
        embed_size: size of an embedding, E.
        num_hiddens: H, of the encoder too.
        num_layers: L, of the encoder too.
        dropout: on the attention weights and between the layers, in training.
        cell: "gru" or "lstm".
        embed_dropout: on the embeddings and on the inputs of ``dense``, in training.
        attention: "additive", or "dot" for the scaled dot product.
        key_size: features of the encoder's outputs, its ``output_size``; H unless given. If it is
            not H, "dot" has a ``key_layer`` that maps it to H.

    Raises:
        ValueError: an unknown cell or attention, or a dropout outside [0, 1].

    >>> from bahdanau_fast.seq2seq import Seq2SeqEncoder
    >>> encoder, decoder = Seq2SeqEncoder(10, 8, 16, 2), Seq2SeqAttentionDecoder(10, 8, 16, 2)
    >>> X = torch.zeros(4, 7, dtype=torch.long)
    >>> output, state = decoder(X, decoder.init_state(encoder(X), None))
    >>> tuple(output.shape), len(state), tuple(state[0].shape), len(state[1])
    ((4, 7, 10), 3, (4, 7, 16), 2)
    """

    attention: AdditiveAttention | DotProductAttention

    def __init__(
        self,
        vocab_size: int,
        embed_size: int,
        num_hiddens: int,
        num_layers: int,
        dropout: float = 0,
        cell: str = "gru",
        *,
        embed_dropout: float = 0,
        attention: str = "additive",
        key_size: int | None = None,
    ) -> None:
        super().__init__()
        checks.probability("embed_dropout", embed_dropout)
        self.embed_dropout = nn.Dropout(embed_dropout)
        key_size = num_hiddens if key_size is None else key_size
        if attention not in ("additive", "dot"):
            checks.reject(ValueError, "attention", "be 'additive' or 'dot'", repr(attention))
        self.key_layer = None
        if attention == "additive":
            self.attention = AdditiveAttention(key_size, num_hiddens, num_hiddens, dropout)
        else:
            self.attention = DotProductAttention(dropout)
            if key_size != num_hiddens:
                self.key_layer = nn.Linear(key_size, num_hiddens, bias=False)
        self.embedding = nn.Embedding(vocab_size, embed_size)
        self.rnn = recurrent(cell, embed_size + key_size, num_hiddens, num_layers, dropout)
        self.dense = nn.Linear(num_hiddens, vocab_size)
        self._attention_weights: list[Tensor] = []
        # The course's LSTM version calls it attention_cell.
        hook = partial(rename, "attention_cell.", "attention.")
        self.register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]

    def init_state(
        self, enc_outputs: tuple[Tensor, Hidden], enc_valid_lens: Tensor | None = None, *args: Any
    ) -> State:
        """Make the first state ``[outputs (B,Tk,key_size), hidden, enc_valid_lens]``.

        Args:
            enc_outputs: outputs (Tk,B,key_size) and hidden state of the encoder.
            enc_valid_lens: (B,) or None.
            *args: ignored.
        """
        outputs, hidden = enc_outputs
        # Copied into (B,Tk,H) order once, since every step reads it.
        return [outputs.transpose(0, 1).contiguous(), hidden, enc_valid_lens]

    def memory(self, state: State) -> Memory:
        """Project the keys of a state, for any number of calls of :meth:`step`."""
        enc_outputs, _, enc_valid_lens = state
        keys = enc_outputs if self.key_layer is None else self.key_layer(enc_outputs)
        return self.attention.memory(keys, enc_outputs, enc_valid_lens)

    def step(
        self, embedded: Tensor, hidden: Hidden, memory: Memory
    ) -> tuple[Tensor, Tensor, Hidden]:
        """One token of every sequence; see :meth:`StepDecoder.step`."""
        return attend_step(self.attention, self.rnn, embedded, hidden, memory)

    def write(
        self, hidden: Hidden, memory: Any, banned_tokens: list[int], max_steps: int
    ) -> tuple[Tensor, Tensor] | None:
        """Greedy decoding in one call; see :meth:`StepDecoder.write`."""
        if type(self).step is not Seq2SeqAttentionDecoder.step:
            return None
        layers = (self.attention, self.rnn, self.embedding, self.dense)
        special = SpecialTokens(BOS, EOS, PAD)
        return decode_greedily(layers, hidden, memory, special, banned_tokens, max_steps)

    def forward(self, X: Tensor, state: State) -> tuple[Tensor, State]:
        """Decode tokens of a target.

        Args:
            X: (B,T) tokens, the first usually <bos>.
            state: from :meth:`init_state` or from the previous call.

        Returns:
            Logits (B,T,vocab) and the state ``[enc_outputs, hidden, enc_valid_lens]``.
        """
        enc_outputs, hidden, enc_valid_lens = state
        embedded = self.embed_dropout(self.embedding(X.t()))
        # A subclass may override step.
        step = None if type(self).step is Seq2SeqAttentionDecoder.step else self.step
        memory = self.memory(state)
        decoded = decode_inputs(self.attention, self.rnn, embedded, hidden, memory, step)
        self._attention_weights = list(decoded.weights.unsqueeze(2).unbind(0))
        features = decoded.features.transpose(0, 1)
        logits = apply_layer(self.dense, self.embed_dropout(features))
        return logits, [enc_outputs, decoded.hidden, enc_valid_lens]

    @property
    def attention_weights(self) -> list[Tensor]:
        """One (B,1,Tk) per step of the last call."""
        return self._attention_weights

    def __getstate__(self) -> dict[str, Any]:
        # Weights inside an autograd graph can be neither copied nor pickled.
        detached = [weights.detach() for weights in self._attention_weights]
        return {**self.__dict__, "_attention_weights": detached}


class Seq2SeqDecoder(StepDecoder):
    """The course's decoder without attention: one context for all steps.

    The context is the state of the encoder's top layer, appended to the token's embedding at every
    step (Cho et al. 2014, https://arxiv.org/abs/1406.1078). Arguments and errors are those of
    :class:`Seq2SeqAttentionDecoder`.

    >>> from bahdanau_fast.seq2seq import Seq2SeqEncoder
    >>> encoder, decoder = Seq2SeqEncoder(10, 8, 16, 2), Seq2SeqDecoder(10, 8, 16, 2)
    >>> X = torch.zeros(4, 7, dtype=torch.long)
    >>> output, state = decoder(X, decoder.init_state(encoder(X)))
    >>> tuple(output.shape), tuple(state[0].shape)
    ((4, 7, 10), (4, 16))
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
        embed_dropout: float = 0,
    ) -> None:
        super().__init__()
        checks.probability("embed_dropout", embed_dropout)
        self.embed_dropout = nn.Dropout(embed_dropout)
        self.embedding = nn.Embedding(vocab_size, embed_size)
        self.rnn = recurrent(cell, embed_size + num_hiddens, num_hiddens, num_layers, dropout)
        self.dense = nn.Linear(num_hiddens, vocab_size)

    def init_state(
        self, enc_outputs: tuple[Tensor, Hidden], enc_valid_lens: Tensor | None = None, *args: Any
    ) -> State:
        """Make the first state ``[context (B,H), hidden, enc_valid_lens]``.

        Args:
            enc_outputs: what the encoder returned; its outputs are not used.
            enc_valid_lens: (B,) or None.
            *args: ignored.
        """
        _, hidden = enc_outputs
        return [(hidden[0] if isinstance(hidden, tuple) else hidden)[-1], hidden, enc_valid_lens]

    def memory(self, state: State) -> Tensor:
        """The context (B,H)."""
        context: Tensor = state[0]
        return context

    def step(self, embedded: Tensor, hidden: Hidden, memory: Tensor) -> tuple[Tensor, None, Hidden]:
        """One token of every sequence; see :meth:`StepDecoder.step`."""
        batch, size = memory.shape
        sequences = embedded.shape[0] // max(batch, 1)
        context = memory.unsqueeze(1).expand(-1, sequences, -1).reshape(-1, size)
        features, hidden = self.rnn(torch.cat((embedded, context), -1).unsqueeze(0), hidden)
        return features.squeeze(0), None, hidden

    def forward(self, X: Tensor, state: State) -> tuple[Tensor, State]:
        """Decode tokens of a target, all steps in one call of the recurrent net.

        Args:
            X: (B,T) tokens, the first usually <bos>.
            state: from :meth:`init_state` or from the previous call.

        Returns:
            Logits (B,T,vocab) and the next state.
        """
        context, hidden, enc_valid_lens = state
        embedded = self.embed_dropout(self.embedding(X))
        inputs = torch.cat((embedded, context.unsqueeze(1).expand(-1, X.shape[1], -1)), -1)
        features, hidden = self.rnn(inputs.transpose(0, 1), hidden)
        logits = self.dense(self.embed_dropout(features.transpose(0, 1)))
        return logits, [context, hidden, enc_valid_lens]
