"""What authors of public reports wished for, in a few lines each; their addresses beside them.

Numbers are held to the formulas elsewhere; here it is shown that the wish can be said.
"""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import bahdanau_fast as bf

B, T, TK, D, H = 3, 4, 6, 5, 8
LENS = torch.tensor([6, 2, 4])
PADDED = torch.arange(TK) >= LENS.unsqueeze(1)
close = torch.testing.assert_close


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_attention_to_its_own_history():  # pytorch/pytorch#6294
    attention, states = bf.AdditiveAttention(D, D, H), torch.randn(T, B, D)
    memory = attention.memory(states[0].unsqueeze(1))
    for state in states[1:]:
        context = attention.attend(state, memory)
        memory = memory.append(state)
    close(context, attention(state, states[:-1].transpose(0, 1)))


# keras-team/keras#4962, yusanshi/news-recommendation#9, tech-srl/code2vec#10, and more
def test_pooling_does_not_look_at_padding():
    pooling, words = bf.AttentionPooling(D, H), torch.randn(B, TK, D)
    pooled = pooling(words, LENS)
    assert pooling.attention_weights.squeeze(1)[PADDED].abs().max() == 0
    close(pooled[1], pooling(words[1, :2]))


def test_raw_scores_of_a_gated_pooling():  # mahmoodlab/CLAM#2, #40, utayao/Atten_Deep_MIL#17
    pooling, bag = bf.AttentionPooling(D, H, heads=2, gated=True), torch.randn(900, D)
    _, weights, scores = pooling(bag, return_scores=True)
    close(scores.softmax(1), weights)


def test_statistics_know_lengths():  # NVIDIA-NeMo/Speech#5401
    pooling, frames = bf.AttentionPooling(D, H, statistics=True), torch.randn(B, TK, D)
    close(pooling(frames, LENS)[2], pooling(frames[2, :4]))


def test_sigmoid_in_place_of_tanh():  # CRIPAC-DIG/SR-GNN#4
    attention = bf.AdditiveAttention(D, D, H, activation="sigmoid")
    items = torch.randn(B, TK, D)
    weights = attention.scores(items[:, -1], attention.memory(items))
    session = (weights.masked_fill(PADDED, 0.0).unsqueeze(1) @ items).squeeze(1)
    assert session.shape == (B, D)


def test_keys_that_were_looked_at_count_less():  # yaserkl/RLSeq2Seq#8
    """exp(score) over the sum of those of earlier steps, in place of exp(score)."""
    attention, states = bf.AdditiveAttention(D, D, H), torch.randn(B, T, D)
    scores = attention.scores(states, attention.memory(torch.randn(B, TK, D)))
    earlier = scores.logcumsumexp(1)[:, :-1]
    weights = bf.masked_softmax(scores[:, 1:] - earlier, LENS)
    factors = (scores[:, 2].exp() / scores[:, :2].exp().sum(1)).masked_fill(PADDED, 0.0)
    close(weights[:, 1], factors / factors.sum(1, keepdim=True))


def test_scores_of_a_memory_know_its_lengths():  # tensorflow/addons#133
    attention = bf.AdditiveAttention(D, D, H)
    memory = attention.memory(torch.randn(B, TK, D), valid_lens=LENS)
    scores = attention.scores(torch.randn(B, D), memory, masked=True)
    assert torch.equal(scores == -torch.inf, PADDED)


def test_a_mask_of_numbers_is_refused_with_the_cure():  # s3prl/s3prl#579
    attention, keys = bf.AdditiveAttention(D, D, H), torch.randn(B, TK, D)
    with pytest.raises(TypeError, match="mask == 0"):
        attention(keys[:, :1], keys, mask=PADDED * -1e9)


# gabrielloye/Attention_Seq2seq-Translation#6, AuCson/PyTorch-Batch-Attention-Seq2seq#4
def test_a_state_of_all_layers_is_refused_with_the_cure():
    attention, (_, hidden) = bf.AdditiveAttention(D, H, H), nn.GRU(D, H, 2)(torch.randn(T, B, D))
    with pytest.raises(ValueError, match=r"hidden\[-1\]"):
        attention(hidden, torch.randn(B, TK, D))
    assert attention(hidden[-1], torch.randn(B, TK, D)).shape == (B, D)


# lturing/tacotronv2_wavernn_chinese#23, Rayhane-mamah/Tacotron-2#302, mozilla/TTS#201
def test_long_sentences_are_read_in_order():
    attention = bf.LocationAttention(D, H, H, 4, 3, normalize="forward")
    memory, weights, location = attention.memory(torch.randn(B, TK, D)), None, torch.zeros(B, 1, TK)
    for query in torch.randn(2, B, 1, H):
        attention.attend(query, memory, location, previous=weights, window=(1, 2))
        weights = location = attention.attention_weights
    assert weights[..., 3:].abs().max() == 0


def test_attention_after_the_cell():  # Tacotron and Luong: keithito/tacotron#24
    decoder = bf.AttentionGRU(D, H, attention_first=False)
    outputs, _ = decoder(torch.randn(T, B, D), keys=torch.randn(B, TK, H))
    assert outputs.shape == (T, B, 2 * H)


def test_packed_inputs():  # pytorch/pytorch#47439, bentrevett/pytorch-seq2seq#91
    inputs = pack_sequence([torch.randn(n, D) for n in (4, 3, 1)])
    outputs, _ = bf.AttentionGRU(D, H)(inputs, keys=torch.randn(B, TK, H), valid_lens=LENS)
    assert outputs.batch_sizes.tolist() == [3, 2, 2, 1]


# OpenNMT/OpenNMT-py#1464, yunjey/show-attend-and-tell#15, Rayhane-mamah/Tacotron-2#346
@pytest.mark.parametrize("name", ["coverage", "doubly_stochastic", "guided"])
def test_losses_of_the_weights(name):
    decoder = bf.AttentionGRU(D, H)
    decoder(torch.randn(T, B, D), keys=torch.randn(B, TK, H), valid_lens=LENS)
    getattr(bf.losses, name)(decoder.attention_weights).backward()
    assert decoder.attention.W_k.weight.grad.abs().max() > 0


def test_a_checkpoint_with_biases():  # sgrvinod, AaronCCWong, keon
    layers = nn.Linear(D, H), nn.Linear(D, H), nn.Linear(H, 1)
    attention, keys = bf.AdditiveAttention.from_linears(*layers), torch.randn(B, TK, D)
    hidden = torch.tanh(layers[0](keys[:, :1]) + layers[1](keys))
    close(attention(keys[:, :1], keys), (layers[2](hidden).softmax(1) * keys).sum(1, keepdim=True))


def test_a_learnt_query_of_all_rows():  # pandeykartikey/Hierarchical-Attention-Network#5
    attention, query = bf.AdditiveAttention(D, D, H), nn.Parameter(torch.randn(D))
    assert attention(query, torch.randn(B, TK, D)).shape[-1] == D


def test_causal_and_scaled():  # tensorflow/tensorflow#44127, pytorch/pytorch#119811
    attention, x = bf.AdditiveAttention(D, D, H), torch.randn(B, TK, D)
    attention(x, x, causal=True, scale=H**-0.5)
    assert attention.attention_weights.triu(1).abs().max() == 0
