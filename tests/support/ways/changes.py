"""What the ways of table.py do to a side (sides.py) between two calls."""

import ctypes
import pickle
import threading
from operator import attrgetter

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def array(tensor):
    """Its memory as numpy sees it."""
    return tensor.detach().numpy()


def given(s, tensor):
    """Make this the keys, a leaf as the ones before."""
    s.keys = tensor.requires_grad_() if s.keys.requires_grad else tensor


def times(name):
    """A tensor of a side, in place."""
    return lambda s: attrgetter(name)(s).mul_(-1.5)


def numpy_times(name):
    return lambda s: array(attrgetter(name)(s)).__imul__(-1.5)


def renew_data(name):
    """``x.data = new``, which in general is at another address."""

    def change(s):
        x = attrgetter(name)(s)
        x.data = s.draw(*x.shape)

    return change


def w_k(s):
    return s.module.W_k.weight


def optimizer(kind, how):
    """One step of an optimizer, with drawn gradients."""

    def change(s):
        parameters = list(s.module.parameters())
        for parameter in parameters:
            parameter.grad = s.draw(*parameter.shape)
        ways = {name: name == how for name in ("foreach", "fused")}
        kind(parameters, lr=0.5, **ways).step()
        for parameter in parameters:
            parameter.grad = None

    return change


def exponential_average(s):
    for p in s.module.parameters():
        p.data.mul_(0.3).add_(s.draw(*p.shape), alpha=0.7)


def to_vector(s):
    s.notes["vector"] = parameters_to_vector(s.module.parameters()).detach().clone()
    vector_to_parameters(s.notes["vector"], s.module.parameters())


def vector_again(s):
    s.notes["vector"].mul_(-1.5)
    vector_to_parameters(s.notes["vector"], s.module.parameters())


def data_at_the_same_address(s):
    """The allocator often gives back what was freed last; here it is asked until it does."""
    weight = w_k(s)
    fresh, address = s.draw(*weight.shape), weight.data_ptr()
    weight.data = torch.empty(0, dtype=weight.dtype)
    tried = [torch.empty_like(fresh) for _ in range(64)]
    weight.data = next((x for x in tried if x.data_ptr() == address), tried[-1]).copy_(fresh)


def new_bias(s):
    s.module.bias = nn.Parameter(s.draw(*s.module.bias.shape))


def bias_of_the_same_id(s):
    """And of the same memory; Python often puts a new object where one of its size has died."""
    memory, identity = s.module.bias.detach(), id(s.module.bias)
    array(memory)[:] = array(s.draw(*memory.shape))
    s.module.bias = None
    tried = [nn.Parameter(memory)]
    while id(tried[-1]) != identity and len(tried) < 64:
        tried.append(nn.Parameter(memory))
    s.module.bias = tried[-1]


def keys_of_the_same_address(s):
    """The old keys die first: what comes next is often where they were."""
    fresh, asked = 2 * s.draw(*s.keys.shape), s.keys.requires_grad
    s.keys = None
    s.keys = fresh.clone().requires_grad_(asked)


def load(s, **how):
    s.module.load_state_dict({n: s.draw(*x.shape) for n, x in s.module.state_dict().items()}, **how)


def swapping(function):
    """The same while conversions swap tensors in place of setting their data."""

    def change(s):
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            function(s)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    return change


def rounded(s):
    for p in s.module.parameters():
        p.copy_((p * 2).round() / 2)


def in_another_process(s):
    """A forked child, as a data loader's worker is, writes into shared memory."""
    child = torch.multiprocessing.get_context("fork").Process(
        target=ctypes.memset, args=(s.keys.data_ptr(), 0, 400)
    )
    child.start()
    child.join()
    assert child.exitcode == 0


def by_a_thread(s):
    thread = threading.Thread(target=lambda: array(s.keys).__imul__(-1.5))
    thread.start()
    thread.join()


def swap_rows(s):
    """The same numbers, in another order: a sum over bytes stays what it was."""
    numbers = array(s.keys)
    numbers[1, [3, 4]] = numbers[1, [4, 3]]


def storage_filled(s):
    fresh = s.draw(*s.keys.shape)
    s.keys.untyped_storage().copy_(fresh.untyped_storage())


def storage_freed_and_filled(s):
    fresh, storage = s.draw(*s.keys.shape), s.keys.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    s.keys.data.copy_(fresh)


def hidden_from_versions(s):
    with torch.autograd._unsafe_preserve_version_counter(s.keys):
        s.keys.mul_(-1.5)


def other_strides(s):
    """The same address, shape and bytes, read in another order."""
    rows, columns = s.keys.shape[1:]
    s.keys.data = s.keys.data.as_strided(s.keys.shape, (rows * columns, 1, rows))


def as_one_row(s):
    """The same bytes as one row of all the keys."""
    s.keys, s.values = (x.detach().view(1, -1, x.shape[2]) for x in (s.keys, s.values))
    s.queries, s.lens = s.queries.detach()[:1], s.lens[1:2]


def complex_pair(s):
    s.notes["complex"] = torch.complex(s.draw(*s.keys.shape), s.keys.detach().clone())
    s.keys = s.notes["complex"].imag


def negative_view(s):
    """Of the same bytes: a flag of the tensor alone tells them apart."""
    s.keys = s.notes["complex"].conj().imag


def time_first(s):
    given(s, s.keys.detach().transpose(0, 1).contiguous().transpose(0, 1))


def expanded(s):
    s.notes["row"] = s.keys.detach()[:1].clone()
    s.keys = s.notes["row"].expand(s.keys.shape)


def shorter(s):
    # Weights of a call hold the node of its values, which knows their shape (compatibility.md).
    s.module.attention_weights = None
    for x in (s.keys, s.values):
        x.resize_(x.shape[0], x.shape[1] - 3, x.shape[2])


def halved(side):
    """The parameters through fp16; their new memory may be where the old was."""
    side.module.half().double()


def to_dtype(s, dtype):
    s.module.to(dtype)
    s.encoder.to(dtype)
    for name in ("source", "queries", "keys", "values"):
        x = getattr(s, name)
        setattr(s, name, x.detach().to(dtype).requires_grad_(x.requires_grad))


def other_module(copied, original):
    """The weights of a copy change; the next call is by the copy, or by the original."""

    def change(s):
        s.module.attention_weights = None  # of the graph: the plain module cannot copy it
        other = copied(s.module)
        with torch.no_grad():
            other.W_k.weight.mul_(-1.5)
        s.module = s.module if original else other

    return change


def pickled(module):
    return pickle.loads(pickle.dumps(module))


def called_with_others(s):
    others = {name: s.draw(*p.shape) for name, p in s.module.named_parameters()}
    return torch.func.functional_call(s.module, others, (s.queries, s.keys, s.values, s.lens))


def turned_round(name):
    """``requires_grad`` of an input, or of the module's bias."""

    def change(s):
        x = s.module.bias if name == "bias" else getattr(s, name)
        x.requires_grad_(not x.requires_grad)

    return change


def inference_with_gradients(s):
    with torch.inference_mode(), torch.enable_grad():
        s.call()


def other_mode(s):
    with torch.set_grad_enabled(not torch.is_grad_enabled()):
        s.call()


def under_autocast(s):
    with torch.autocast("cpu", torch.bfloat16):
        s.call()
