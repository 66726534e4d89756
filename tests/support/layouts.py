"""Memory layouts: each gives the values of x in another arrangement; what lies between is NaN."""

import torch

NAN = float("nan")


def around(x):
    """What is beside the values; torch's AMX product reads it, times zero."""
    return 3e38 if x.dtype == torch.bfloat16 else NAN if x.is_floating_point() else 1


def plain(x):
    return x.clone(memory_format=torch.contiguous_format)


def transposed(x):
    if x.dim() < 2:
        return plain(x)
    return x.transpose(-1, -2).clone(memory_format=torch.contiguous_format).transpose(-1, -2)


def strided(x):
    """Every second column of a wider tensor."""
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), NAN)
    wide[..., ::2] = x
    return wide[..., ::2]


def sliced(x):
    """The middle of a larger tensor: an odd offset and odd row strides."""
    padded = x.new_full([size + 3 for size in x.shape], around(x))
    return padded[tuple(slice(1, size + 1) for size in x.shape)].copy_(x)


def part(x):
    """Contiguous, but not at the beginning, as parameters that share a buffer are."""
    whole = x.new_full((x.numel() + 6,), around(x))
    return whole[3 : x.numel() + 3].view(x.shape).copy_(x)


def batch_last(x):
    """The batch (or first) axis moved inside, as an RNN's (T,B,H) output has it."""
    if x.dim() < 2:
        return plain(x)
    return x.transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1)


def expanded(x):
    """One slice of the first axis, repeated without memory. Only for x that is alike there."""
    return x[:1].clone().expand(x.shape) if x.shape[0] else x.clone()


LAYOUTS = {f.__name__: f for f in (plain, transposed, strided, sliced, part, batch_last, expanded)}
