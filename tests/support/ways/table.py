"""Ways to change what a call depends on, between two calls; those of layers are in layers.py."""

import copy
import ctypes

import torch
from torch import nn
from torch.nn.utils import prune, vector_to_parameters

from ways import changes
from ways.kinds import KINDS
from ways.layers import GRADIENTS, LAYERED, MADE_ANEW
from ways.sides import WATCHED
from ways.way import AFTER, BEFORE, Way

OWN_KEYS = ("encoder",)  # where the keys are computed, there is no place to prepare them
DATA = ("trained", "encoder", "compiled")  # for keys that no gradient is asked of
GRAPHS = DATA  # a graph holds the tensors, so that they cannot be swapped
INFERENCE = ("inference", "born in inference")  # of its tensors no gradient can be asked
OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)

WAYS = (
    Way("keys", "`keys.mul_(-1.5)`", changes.times("keys")),
    Way("keys", "`keys[1, 3] = 7`", lambda s: s.keys[1].__setitem__(3, 7.0)),
    Way("keys", "written through a view", lambda s: s.keys[:, 2:4].zero_()),
    Way("keys", "`keys.copy_(new)`", lambda s: s.keys.copy_(s.draw(*s.keys.shape))),
    Way("keys", "`torch.mul(keys, 2, out=keys)`", lambda s: torch.mul(s.keys, 2.0, out=s.keys)),
    Way(
        "keys",
        "in place in the autograd graph",
        changes.times("keys"),
        graph=True,
        without=("trained", "compiled"),
    ),
    Way("keys", "`keys.detach().mul_(-1.5)`", lambda s: s.keys.detach().mul_(-1.5)),
    Way("keys", "`keys.data.mul_(-1.5)`", changes.times("keys.data")),
    Way("keys", "`keys.data = new`", changes.renew_data("keys")),
    Way("keys", "`keys.data` of other strides at the same address", changes.other_strides),
    Way("keys", "`keys.set_(new)`", lambda s: s.keys.set_(s.draw(*s.keys.shape))),
    Way("keys", "`keys.resize_()`, fewer of them", changes.shorter, without=DATA),
    Way(
        "keys",
        "`torch.utils.swap_tensors(keys, new)`",
        lambda s: torch.utils.swap_tensors(s.keys, s.draw(*s.keys.shape)),
        without=DATA,
    ),
    Way("keys", "a new tensor where the old one died", changes.keys_of_the_same_address),
    Way("keys", "the same bytes in another shape", changes.as_one_row),
    Way(
        "keys",
        "the negative view of the same bytes",
        changes.negative_view,
        changes.complex_pair,
        without=DATA,
    ),
    Way(
        "keys",
        "a version counter that is held back",
        changes.hidden_from_versions,
        without=("born in inference",),
    ),
    Way("keys", "`keys.numpy()`", changes.numpy_times("keys")),
    Way(
        "keys",
        "`torch.from_numpy`, the array written",
        lambda s: s.notes["array"].__imul__(-1.5),
        lambda s: (
            s.notes.update(array=changes.array(s.keys).copy()),
            changes.given(s, torch.from_numpy(s.notes["array"])),
        ),
        without=OWN_KEYS,
    ),
    Way("keys", "DLPack", lambda s: torch.from_dlpack(s.keys.detach()).mul_(-1.5)),
    Way("keys", "`untyped_storage().copy_()`", changes.storage_filled),
    Way("keys", "storage freed, made anew and filled", changes.storage_freed_and_filled),
    Way(
        "keys",
        "`ctypes.memset` at `data_ptr()`",
        lambda s: ctypes.memset(s.keys.data_ptr(), 0, 400),
    ),
    Way("keys", "two rows exchanged through numpy", changes.swap_rows),
    Way(
        "keys",
        "time first, then transposed, through numpy",
        changes.numpy_times("keys"),
        changes.time_first,
        without=OWN_KEYS,
    ),
    Way(
        "keys",
        "the row that is expanded to all of them",
        lambda s: changes.array(s.notes["row"]).__imul__(-1.5),
        changes.expanded,
        without=DATA,
    ),
    Way("keys", "written by another thread", changes.by_a_thread),
    Way(
        "keys",
        "`share_memory_()`, written by another process",
        changes.in_another_process,
        lambda s: changes.given(s, s.keys.detach().clone().share_memory_()),
        without=OWN_KEYS,
    ),
    Way(
        "graph",
        "`keys.detach_().requires_grad_()`",
        lambda s: s.keys.detach_().requires_grad_(),
        graph=True,
        moves=False,
        without=("eager", "trained", "compiled", "inference", "born in inference"),
    ),
    Way("graph", "`keys.detach_()`", lambda s: s.keys.detach_(), graph=True, moves=False),
    *(
        Way(
            "graph",
            f"`{name}.requires_grad_()` turned round, and again",
            changes.turned_round(name),
            graph=True,
            moves=False,
            without=INFERENCE if name == "bias" else ("encoder", *INFERENCE),
            kinds=("additive", "location") if name == "bias" else tuple(KINDS),
            whens=(AFTER, BEFORE),
            times=3,
        )
        for name in ("keys", "values", "queries", "bias")
    ),
    GRADIENTS,
    *(
        Way(
            "graph",
            f"`attention_weights`: {how}",
            lambda s, look=look: setattr(s, "look", look),
            moves=False,
            without=("compiled",),  # outputs of compiled code have no gradients of each other
            kinds=tuple(KINDS),
            whens=(AFTER, BEFORE),
        )
        for how, look in WATCHED.items()
        if look is not None
    ),
    Way("graph", "a call with gradients turned round", changes.other_mode, graph=True, moves=False),
    Way(
        "graph",
        "a call in `inference_mode`",
        lambda s: torch.inference_mode()(s.call)(),
        moves=False,
    ),
    Way(
        "graph",
        "a call in `inference_mode` with `enable_grad`",
        changes.inference_with_gradients,
        moves=False,
    ),
    Way("graph", "a call under autocast", changes.under_autocast, moves=False, dtype=torch.float32),
    Way("values", "`values.mul_(-1.5)`", changes.times("values")),
    Way("values", "`values.data.mul_(-1.5)`", changes.times("values.data")),
    Way("values", "`values.numpy()`", changes.numpy_times("values")),
    Way("values", "`values.data = new`", changes.renew_data("values"), pending=False),
    Way("values", "another tensor", lambda s: setattr(s, "values", 2 * s.values)),
    Way("lengths", "`lens.add_(1)`", lambda s: s.lens.add_(1)),
    Way("lengths", "`lens.data.add_(1)`", lambda s: s.lens.data.add_(1)),
    Way("lengths", "`lens.numpy()`", lambda s: changes.array(s.lens).__iadd__(1)),
    Way("lengths", "another tensor", lambda s: setattr(s, "lens", s.lens + 1)),
    Way("lengths", "none any more", lambda s: setattr(s, "lens", None)),
    Way("weights", "`W_k.weight.mul_(-1.5)`", changes.times("module.W_k.weight")),
    Way("weights", "`W_q.weight.mul_(-1.5)`", changes.times("module.W_q.weight")),
    Way("weights", "`w_v.weight.mul_(-1.5)`", changes.times("module.w_v.weight")),
    Way("weights", "`W_q.weight.data.mul_(-1.5)`", changes.times("module.W_q.weight.data")),
    Way("weights", "`w_v.weight.data.mul_(-1.5)`", changes.times("module.w_v.weight.data")),
    Way("weights", "`p.data`: an exponential average", changes.exponential_average),
    Way("weights", "`W_k.weight.data = new`", changes.renew_data("module.W_k.weight")),
    Way("weights", "`W_k.weight.data = new` at the same address", changes.data_at_the_same_address),
    Way(
        "weights",
        "`W_k.weight = Parameter(new)`",
        lambda s: setattr(s.module.W_k, "weight", nn.Parameter(s.draw(*changes.w_k(s).shape))),
    ),
    Way(
        "weights",
        "`vector_to_parameters` of another vector",
        lambda s: vector_to_parameters(
            s.draw(sum(p.numel() for p in s.module.parameters())), s.module.parameters()
        ),
        pending=False,
    ),
    Way(
        "weights",
        "`vector_to_parameters` again, the vector changed",
        changes.vector_again,
        changes.to_vector,
    ),
    Way("weights", "rounded: `p.copy_(round(p))`", changes.rounded),
    Way("weights", "`W_k.weight.numpy()`", changes.numpy_times("module.W_k.weight")),
    Way(
        "weights",
        "`ctypes.memset` at `W_k.weight.data_ptr()`",
        lambda s: ctypes.memset(changes.w_k(s).data_ptr(), 0, 400),
    ),
    Way("weights", "`load_state_dict`", changes.load),
    Way("weights", "`load_state_dict(assign=True)`", lambda s: changes.load(s, assign=True)),
    Way(
        "weights",
        "`load_state_dict`, tensors swapped",
        changes.swapping(changes.load),
        without=GRAPHS,
    ),
    Way("weights", "`half().double()`", changes.halved, pending=False),
    Way(
        "weights",
        "`half().double()`, tensors swapped",
        changes.swapping(changes.halved),
        without=GRAPHS,
    ),
    Way(
        "weights",
        "all in float32",
        lambda s: changes.to_dtype(s, torch.float32),
        moves=False,
        pending=False,
    ),
    *(
        Way("weights", f"`{kind.__name__}`, {how}", changes.optimizer(kind, how))
        for kind in OPTIMIZERS
        for how in ("fused", "foreach", "plain")
    ),
    Way(
        "weights",
        "`prune.remove`",
        lambda s: (
            prune.l1_unstructured(s.module.W_k, "weight", 0.5),
            prune.remove(s.module.W_k, "weight"),
        ),
    ),
    Way("bias", "`bias.mul_(-1.5)`", changes.times("module.bias")),
    Way("bias", "`bias.data.mul_(-1.5)`", changes.times("module.bias.data")),
    Way("bias", "`bias.numpy()`", changes.numpy_times("module.bias")),
    Way("bias", "`bias = Parameter(new)`", changes.new_bias),
    Way(
        "bias",
        "`bias = Parameter(new)` of the same id",
        changes.bias_of_the_same_id,
        changes.new_bias,
    ),
    Way("bias", "`bias = None`", lambda s: setattr(s.module, "bias", None)),
    *LAYERED,
    *MADE_ANEW,
    Way(
        "layers",
        "`deepcopy`, the copy changed and called",
        changes.other_module(copy.deepcopy, False),
    ),
    Way(
        "layers",
        "`deepcopy`, the copy changed",
        changes.other_module(copy.deepcopy, True),
        moves=False,
    ),
    Way(
        "layers",
        "`pickle`, the copy changed and called",
        changes.other_module(changes.pickled, False),
    ),
    Way("layers", "`functional_call` with other weights", changes.called_with_others, moves=False),
)
