"""Recurrent layers that attend at every step: GRU and LSTM decoders over a sequence of inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from bahdanau_fast import checks
from bahdanau_fast.memory import Memory
from bahdanau_fast.modules import AdditiveAttention
from bahdanau_fast.modules.base import KeepsWeights
from bahdanau_fast.modules.decoder_loop import (
    DecoderOutputs,
    attend_with_hooks,
    attention_last_has_operator,
    decode_attention_last,
    decode_inputs,
    explain,
)
from bahdanau_fast.modules.layers import plain_weight
from bahdanau_fast.modules.location import LocationAttention, LocationSteps

Inputs = TypeVar("Inputs", Tensor, PackedSequence)


class _AttentionRNN(KeepsWeights):
    """Base of both layers; a subclass sets ``_cell``."""

    _cell: type[nn.GRU] | type[nn.LSTM]
    # Of modules that were pickled before they had these.
    attention_first = input_feeding = True
    value_size: int | None = None

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        *,
        key_size: int | None = None,
        value_size: int | None = None,
        num_hiddens: int | None = None,
        attention_dropout: float = 0.0,
        attention_first: bool = True,
        input_feeding: bool = True,
        location: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if attention_first and not input_feeding:
            checks.reject(ValueError, "input_feeding", "be True where attention is first", False)
        if location is not None and not input_feeding:
            checks.reject(ValueError, "input_feeding", "be True with a location", False)
        self.attention_first, self.input_feeding = attention_first, input_feeding
        key_size = hidden_size if key_size is None else key_size
        value_size = key_size if value_size is None else value_size
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.batch_first, self.value_size = batch_first, value_size
        sizes = key_size, hidden_size, hidden_size if num_hiddens is None else num_hiddens
        self.attention: AdditiveAttention | LocationAttention
        if location is None:
            self.attention = AdditiveAttention(*sizes, attention_dropout, **factory)
        else:
            factory_of_both = {"dropout": attention_dropout, **factory}
            self.attention = LocationAttention(*sizes, **{**factory_of_both, **location})
        below = value_size * input_feeding + input_size
        self.rnn = self._cell(below, hidden_size, num_layers, bias, dropout=dropout, **factory)

    def forward(
        self,
        inputs: Inputs,
        hidden: Any = None,
        keys: Tensor | None = None,
        values: Tensor | None = None,
        valid_lens: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        memory: Memory | None = None,
        context: Tensor | None = None,
    ) -> tuple[Inputs, Any]:
        """Decode all inputs.

        Args:
            inputs: (T,B,E), with ``batch_first`` (B,T,E); or a packed sequence. All else has the
                order of the batch before it was packed, as for ``nn.GRU``.
            hidden: (L,B,H), for an LSTM a pair of those; default zeros.
            keys: (B,Tk,Dk).
            values: (B,Tk,Dv); default: the keys.
            valid_lens: None or (B,).
            mask: bool (B,Tk) or (B,1,Tk), True where the steps may look; with lengths, both hold.
            memory: from ``attention.memory(...)``, instead of keys, values and lengths; with a
                mask in it, both masks hold.
            context: (B,Dv), what the first step takes where the context of a step goes into the
                next one (``attention_first=False``); default zeros.

        Returns:
            Outputs of the top layer (T,B,H) or (B,T,H), packed where the inputs are, and the last
            hidden state, of every sequence at its last step; sets ``attention_weights`` (B,T,Tk),
            zeros behind the end of a sequence. With ``attention_first=False`` the context of a step
            stands behind its output: (T,B,H+Dv).

        Raises:
            TypeError, ValueError: neither or both of ``keys`` and ``memory``, values or lengths
                beside a memory, a context that no step takes, or sizes that do not fit.
        """
        source = keys, values, valid_lens, mask, memory
        runs, state, memory = self._prepare(inputs, hidden, source, context)
        if isinstance(inputs, PackedSequence):
            packed, weights, state = self._decode_packed(inputs, runs, state, memory)
            outputs: Any = packed
        else:
            outputs, weights, state = self._decode(runs[0], state, memory)
            outputs = outputs.transpose(0, 1) if self.batch_first else outputs
        self.attention_weights = weights.transpose(0, 1)
        return outputs, state[0] if self._feeds_context else state

    if TYPE_CHECKING:
        __call__ = forward

    def explain(
        self,
        inputs: Tensor | PackedSequence,
        hidden: Any = None,
        keys: Tensor | None = None,
        values: Tensor | None = None,
        valid_lens: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        memory: Memory | None = None,
        context: Tensor | None = None,
    ) -> str:
        """How a call with these inputs would be computed, and why; projects the keys, no more.

        On a GPU "one launch" takes all steps, or "a loop" takes launches per step. "One operator"
        takes all steps on the CPU. "Step by step" calls the layers. Of a packed sequence, this is
        said of the steps that have as many rows. Arguments and errors are as for a call.

        >>> AttentionGRU(8, 16).explain(torch.zeros(7, 4, 8), keys=torch.zeros(4, 9, 16))
        'cpu: one operator: its C++ takes all steps'
        """
        source = keys, values, valid_lens, mask, memory
        runs, _, memory = self._prepare(inputs, hidden, source, context)
        if not self.attention_first and not self.input_feeding:
            return "all steps of the layer, then one call of the attention"
        reasons = (self._explain_steps(steps, memory[: steps.shape[1]]) for steps in runs)
        return "; ".join(dict.fromkeys(reasons))

    def _explain_steps(self, steps: Tensor, memory: Memory) -> str:
        layers = self.attention, self.rnn
        if not self._feeds_context:
            return explain(*layers, steps, memory)
        if not attention_last_has_operator(*layers, steps, memory):
            return "step by step: one step, dropped weights, or layers that no operator takes"
        return f"the first step alone, then {explain(*layers, steps[1:], memory)}"

    @property
    def _feeds_context(self) -> bool:
        """Whether attention comes last and the state has its context, an input of the next step."""
        return self.input_feeding and not self.attention_first

    def _decode(self, steps: Tensor, state: Any, memory: Memory) -> DecoderOutputs:
        rnn, attention = self.rnn, cast(Any, self.attention)
        if isinstance(attention, LocationAttention):
            attention = LocationSteps(attention)
        if self.attention_first:
            return decode_inputs(attention, rnn, steps, state, memory)
        if memory.maker is None:
            memory = attention._shared(memory)
        if self._feeds_context:
            return decode_attention_last(attention, rnn, steps, state, memory)
        features, state = rnn(steps, state)
        contexts, weights = attend_with_hooks(attention, features.transpose(0, 1), memory)
        features = torch.cat((features, contexts.transpose(0, 1)), -1)
        return DecoderOutputs(features, weights.transpose(0, 1), state)

    def _decode_packed(
        self, inputs: PackedSequence, runs: list[Tensor], state: Any, memory: Memory
    ) -> tuple[PackedSequence, Tensor, Any]:
        """Run by run: sequences end, the shortest first, and their last states are put aside."""
        features, weights, last_states = [], [], []
        batch = runs[0].shape[1]
        for steps in runs:
            running = steps.shape[1]
            if running < memory.values.shape[0]:
                last_states.append(_select_sequences(state, slice(running, None)))
                state, memory = _select_sequences(state, slice(running)), memory[:running]
            decoded = self._decode(steps, state, memory)
            state = decoded.hidden
            features.append(decoded.features.flatten(0, 1))
            weights.append(F.pad(decoded.weights, (0, 0, 0, batch - running)))
        all_weights, order = torch.cat(weights), inputs.unsorted_indices
        state = _concat_sequences(state, *reversed(last_states))
        if order is not None:
            all_weights, state = all_weights[:, order], _select_sequences(state, order)
        return PackedSequence(torch.cat(features), *inputs[1:]), all_weights, state

    def _prepare(
        self,
        inputs: Tensor | PackedSequence,
        hidden: Any,
        source: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Memory | None],
        context: Tensor | None,
    ) -> tuple[list[Tensor], Any, Memory]:
        """Runs of inputs (T,B,E), the state and the memory of a call, all checked."""
        memory, order = self._memory(*source), None
        if isinstance(inputs, PackedSequence):
            if isinstance(self.attention, LocationAttention):
                checks.reject(TypeError, "inputs", "be padded with a location", "a packed sequence")
            runs, order = _runs_of_equal_batch(inputs), inputs.sorted_indices
            checks.rows("inputs", runs[0])
        else:
            checks.rows("inputs", inputs)
            runs = [inputs.transpose(0, 1) if self.batch_first else inputs]
        steps = runs[0]
        if hidden is None:
            zeros = steps.new_zeros((self.rnn.num_layers, steps.shape[1], self.rnn.hidden_size))
            hidden = (zeros, zeros) if isinstance(self.rnn, nn.LSTM) else zeros
        elif isinstance(self.rnn, nn.LSTM) != isinstance(hidden, tuple):
            need = "be a pair of tensors" if isinstance(self.rnn, nn.LSTM) else "be a tensor"
            checks.reject(TypeError, "hidden", need, type(hidden).__name__)
        elif isinstance(hidden, tuple) and len(hidden) != 2:
            checks.reject(TypeError, "hidden", "be a pair of tensors", f"{len(hidden)} of them")
        self._check(steps, hidden, memory.values.shape)
        state = self._with_context(hidden, context, steps, memory)
        if order is not None:
            state, memory = _select_sequences(state, order), memory[order]
        return runs, state, memory

    def _with_context(
        self, hidden: Any, context: Tensor | None, steps: Tensor, memory: Memory
    ) -> Any:
        """The state: the hidden one; where contexts are fed a pair, with the first (1,B,Dv)."""
        batch, _, size = memory.values.shape
        if context is None:
            return (hidden, steps.new_zeros((1, batch, size))) if self._feeds_context else hidden
        if not self._feeds_context:
            need = "be None where no step takes the context of the one before"
            checks.reject(TypeError, "context", need, "a context")
        checks.weight("context", context, (batch, size), steps, "inputs")
        return hidden, context.unsqueeze(0)

    def _memory(
        self,
        keys: Tensor | None,
        values: Tensor | None,
        valid_lens: Tensor | None,
        mask: Tensor | None,
        memory: Memory | None,
    ) -> Memory:
        """The memory that every step looks at with one query."""
        if (keys is None) == (memory is None):
            got = "neither" if keys is None else "both"
            checks.reject(TypeError, "exactly one of keys and memory", "be given", got)
        if memory is None:
            assert keys is not None
            memory = self.attention._memory(keys, values, valid_lens, shared=False)
        else:
            for name, argument in (("values", values), ("valid_lens", valid_lens)):
                if argument is not None:
                    checks.reject(TypeError, name, "be None beside a memory, which has its", "both")
            layer = self.attention._modules.get(self.attention._key_layer)
            self.attention._check_memory(memory, plain_weight(layer))
        if memory.batch is not None:
            checks.reject(ValueError, "keys", "have one batch dimension", memory.batch)
        lens, seen = memory.valid_lens, memory.mask
        one_query = (lens is None or lens.dim() == 1) and (seen is None or seen.shape[1] == 1)
        if mask is None and one_query:  # which memory() has checked
            return memory
        projected = memory.projected.keys
        query = projected.new_empty((len(projected), 1, 0))
        _, mask, _ = memory.for_queries(query, mask)
        if lens is not None and lens.dim() == 2:  # of one query
            lens = lens.squeeze(1)
        return replace(memory, valid_lens=lens, mask=mask)

    def _check(self, steps: Tensor, hidden: object, values_shape: torch.Size) -> None:
        """Inputs (T,B,E) and the hidden state must fit the layer and values (B,Tk,Dv)."""
        rnn, (batch, _, value_size) = self.rnn, values_shape
        if steps.shape[0] == 0:  # len takes a microsecond
            checks.reject(ValueError, "inputs", "have at least one step", tuple(steps.shape))
        if self.input_feeding and self.value_size not in (None, value_size):
            need = f"have feature size {self.value_size} (value_size)"
            checks.reject(ValueError, "values", need, value_size)
        checks.features("inputs", steps, rnn.input_size - value_size * self.input_feeding)
        if steps.shape[1] != batch:
            need = f"have the batch size of the memory, {batch}"
            checks.reject(ValueError, "inputs", need, tuple(steps.shape))
        shape = (rnn.num_layers, batch, rnn.hidden_size)
        for part in hidden if isinstance(hidden, tuple) else (hidden,):
            checks.rows("hidden", part, "layers, batch, features")
            if tuple(part.shape) != shape:
                checks.reject(ValueError, "hidden", f"have shape {shape}", tuple(part.shape))
            checks.same_kind("hidden", part, "inputs", steps)


def _runs_of_equal_batch(inputs: PackedSequence) -> list[Tensor]:
    """A packed sequence as inputs (T,B,E), one for every run of steps of the same batch size B."""
    sizes = [(len([*steps]), batch) for batch, steps in groupby(inputs.batch_sizes.tolist())]
    runs = inputs.data.split([steps * batch for steps, batch in sizes])
    return [run.unflatten(0, size) for run, size in zip(runs, sizes, strict=True)]


def _select_sequences(state: Any, which: slice | Tensor) -> Any:
    """Some sequences of the batch of a state (L,B,H), or of the states in a tuple."""
    if isinstance(state, tuple):
        return tuple(_select_sequences(part, which) for part in state)
    return state[:, which]


def _concat_sequences(*states: Any) -> Any:
    """The sequences of several states, as one batch."""
    if isinstance(states[0], tuple):
        return tuple(_concat_sequences(*parts) for parts in zip(*states, strict=True))
    return torch.cat(states, 1)


class AttentionGRU(_AttentionRNN):
    """A GRU that attends at every step (Bahdanau, Cho and Bengio 2014), over all inputs.

    ``context_t = attention(h_top[t-1], keys)`` goes in front of input t into the first layer.
    All steps are one operator, forward and backward; :meth:`explain` says where they are not. Of a
    packed sequence, the steps with as many rows are one: sequences of one length are fastest. Its
    ``attention`` and ``rnn`` have the names of the course's decoder, so a ``state_dict`` of one
    loads into the other. Hooks of ``attention`` run at every step, with queries and memory as its
    arguments.

    With ``attention_first=False`` the attention comes after the cell (Luong, Pham and Manning 2015,
    https://arxiv.org/abs/1508.04025, section 3.3; Tacotron): ``context_t = attention(h_top[t],
    keys)``, and the one before goes in front of input t. Outputs are both, ``[h_top[t],
    context_t]``, as the layer takes them that gives Luong's attentional state. With dropout of the
    attention weights, and in compiled code, its steps are taken one by one. With
    ``input_feeding=False`` no context goes into the cell: all its steps come first, then one call
    of the attention with T queries.

    Args:
        input_size: size of an input, E.
        hidden_size: H, the size of the queries too.
        num_layers: number of layers, L.
        bias: of the GRU.
        batch_first: inputs and outputs are (B,T,...) instead of (T,B,...).
        dropout: between the layers, in training.
        key_size: Dk; default H.
        value_size: Dv; default Dk.
        num_hiddens: hidden units of the attention; default H.
        attention_dropout: on the attention weights, in training.
        attention_first: the state before a step is its query; else the one after it.
        input_feeding: the cell takes contexts; False is for ``attention_first=False``.
        location: options of a :class:`LocationAttention`, such as ``{"channels": 10,
            "kernel_size": 31, "inputs": 2}``, which then is the attention: it sees the weights of
            the step before, with two inputs their sum over all steps, too, and with ``"channels":
            None`` that sum alone. Steps are taken one by one, and none of its hooks run.
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        attention_weights: (B,T,Tk) of the last call.

    Raises:
        ValueError: a size below 1, a dropout outside [0, 1], attention that comes first and is not
            fed.

    >>> decoder = AttentionGRU(8, 16, num_layers=2, batch_first=True)
    >>> outputs, hidden = decoder(torch.zeros(4, 7, 8), keys=torch.zeros(4, 9, 16))
    >>> tuple(outputs.shape), tuple(hidden.shape), tuple(decoder.attention_weights.shape)
    ((4, 7, 16), (2, 4, 16), (4, 7, 9))
    """

    _cell = nn.GRU


class AttentionLSTM(_AttentionRNN):
    """An LSTM that attends at every step; all else is as for :class:`AttentionGRU`.

    >>> decoder = AttentionLSTM(8, 16)
    >>> outputs, (hidden, cell) = decoder(torch.zeros(7, 4, 8), keys=torch.zeros(4, 9, 16))
    >>> tuple(outputs.shape), tuple(hidden.shape), tuple(cell.shape)
    ((7, 4, 16), (1, 4, 16), (1, 4, 16))
    """

    _cell = nn.LSTM
