"""Dropout of attention weights: in training only, fair, reproducible, the same in backward."""

import math

import pytest
import torch
from beside import close
from course import CourseAttention, inputs

import bahdanau_fast as bf


def dropped(p, seed=0, B=4, Tq=16, Tk=257, H=8, train=True):
    """Weights before dropout and as the context saw them (values are the identity)."""
    torch.manual_seed(7)
    module = bf.AdditiveAttention(5, 5, H, p).train(train)
    values = torch.eye(Tk).expand(B, -1, -1).clone().requires_grad_()
    q, k = torch.randn(B, Tq, 5), torch.randn(B, Tk, 5)
    torch.manual_seed(seed)
    context = module(q, k, values)
    return module.attention_weights, context, values


def test_dropout_in_training_only():
    weights, seen, _ = dropped(0.5, train=False)
    torch.testing.assert_close(weights, seen)
    weights, seen, _ = dropped(0.0)
    torch.testing.assert_close(weights, seen)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("Tk", [257, 3])
def test_dropout_drops_the_right_share(p, Tk):
    weights, seen, _ = dropped(p, Tk=Tk, B=8, Tq=16 if Tk > 3 else 1000)
    kept = seen != 0
    scaled = torch.where(kept, weights / (1 - p), 0.0)
    close(seen, scaled)
    n = kept.numel()
    assert abs(kept.double().mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / n)
    # every place alike, and neighbours independent
    for axis in ((1, 2), (0, 2)):
        share = kept.double().mean(axis)
        count = n // share.numel()
        assert (share - (1 - p)).abs().max() < 6 * math.sqrt(p * (1 - p) / count)
    both = (kept[..., 1:] & kept[..., :-1]).double().mean()
    assert abs(both - (1 - p) ** 2) < 8 * math.sqrt(p * (1 - p) / n)


def philox(seed, row, block):
    """Four numbers of Philox4x32-10, under counter and key as csrc/common/philox.h has them."""
    low = 2**32 - 1
    counter, key = [block, row & low, row >> 32, 0], [seed & low, seed >> 32]
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        left, right = (second >> 32) ^ counter[1] ^ key[0], (first >> 32) ^ counter[3] ^ key[1]
        counter = [left, second & low, right, first & low]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return counter


def test_the_numbers_are_those_of_philox():
    # The known answer of Random123, which every backend goes by.
    assert philox(0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    B, Tq, Tk, seed = 2, 3, 11, 2**61 + 12345
    q, k, w = torch.randn(B, Tq, 4), torch.randn(B, Tk, 4), torch.randn(1, 4)
    values = torch.eye(Tk).expand(B, -1, -1).contiguous()
    given = {"seed": torch.tensor([seed]), "dropout_p": 0.4}
    seen = torch.ops.bahdanau_fast.attention(q, k, values, w, **given)[0]
    rows = [[philox(seed, row, j // 4)[j % 4] for j in range(Tk)] for row in range(B * Tq)]
    want = torch.tensor(rows).reshape(B, Tq, Tk) >= 0.4 * 2**32
    assert torch.equal(seen != 0, want)


def test_dropout_is_reproducible():
    first, again, other = dropped(0.5, 3)[1], dropped(0.5, 3)[1], dropped(0.5, 4)[1]
    assert torch.equal(first, again)
    assert 0.4 < ((first != 0) != (other != 0)).double().mean() < 0.6
    torch.manual_seed(0)
    module, data = bf.AdditiveAttention(2, 20, 8, 0.5), inputs()
    assert not torch.equal(module(*data), module(*data))  # each step of a loop draws anew


@pytest.mark.parametrize(
    ("B", "Tq", "Tk", "H"),
    [(2, 5, 70, 40), (1, 1, 1033, 80), (20, 3, 40, 8)],
    ids=["", "split", "rows"],
)
def test_gradients_through_dropout(B, Tq, Tk, H):
    # The mask of one call, read off, then the formula with that mask.
    torch.manual_seed(0)
    module = bf.AdditiveAttention(4, 3, H, 0.4)
    q, k = torch.randn(B, Tq, 3, requires_grad=True), torch.randn(B, Tk, 4, requires_grad=True)
    values = torch.eye(Tk).expand(B, -1, -1).clone().requires_grad_()
    context = module(q, k, values)
    mask = (context != 0).float() / 0.6
    course = CourseAttention(4, 3, H)
    course.load_state_dict(module.state_dict())
    course(q, k, values, None)
    plain = (course.attention_weights * mask) @ values
    grad, more = torch.randn(context.shape), torch.randn(context.shape)
    got = torch.autograd.grad(
        (context, module.attention_weights), (q, k, values, *module.parameters()), (grad, more)
    )
    want = torch.autograd.grad(
        (plain, course.attention_weights), (q, k, values, *course.parameters()), (grad, more)
    )
    close(got, want)


def test_dropout_of_everything():
    weights, seen, values = dropped(1.0)
    assert not seen.any()
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:2]))
    (grad,) = torch.autograd.grad(seen.sum(), values)
    assert not grad.any()
