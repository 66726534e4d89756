"""torch.export without a warning, AOTInductor in a fresh process, ONNX in onnxruntime."""

import warnings

import pytest
import torch
from beside import close
from fresh import python
from torch.export import Dim

import bahdanau_fast as bf

B, Tq, Tk = Dim("B", min=2, max=1024), Dim("Tq", min=2, max=4096), Dim("Tk", min=2, max=4096)
DYNAMIC = ({0: B, 1: Tq}, {0: B, 1: Tk}, {0: B, 1: Tk}, {0: B})


def inputs(batch=2, queries=3, keys=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, queries, 4), (batch, keys, 3), (batch, keys, 2)
    lens = torch.arange(batch) * 7 % (keys + 2)
    return (*(torch.randn(s, generator=generator) for s in shapes), lens)


OTHER = inputs(5, 4, 71, seed=1)


def attention(hidden=300, **options):
    torch.manual_seed(0)
    return bf.AdditiveAttention(3, 4, hidden, 0.1, **options).eval()


class Decoder(torch.nn.Module):
    """The course's loop: three steps, and the weights of each."""

    def __init__(self, memory):
        super().__init__()
        self.attention, self.memory = attention(), memory

    def forward(self, queries, keys, values, lens):
        memory = self.attention.memory(keys, values, lens) if self.memory else None
        contexts, weights = [], []
        for step in range(2):
            query = queries[:, step : step + 1]
            if memory is None:
                contexts.append(self.attention(query, keys, values, lens))
            else:
                contexts.append(self.attention.attend(query, memory))
            weights.append(self.attention.attention_weights)
        return torch.cat(contexts, 1), torch.cat(weights, 1)


def exported(model, **how):
    """The program; fails on the first warning that is about the model."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # What torch says of its own code.
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        return torch.export.export(model, inputs(), dynamic_shapes=DYNAMIC, **how)


class Masked(torch.nn.Module):
    """A decoder state that looks where a mask of the keys lets it, and the scores of all keys."""

    def __init__(self):
        super().__init__()
        self.attention = attention()

    def forward(self, queries, keys, values, lens):
        mask = torch.arange(keys.shape[1]) % 3 != lens.unsqueeze(1) % 3
        context = self.attention(queries[:, 0], keys, values, mask=mask)
        return context, self.attention.scores(queries, self.attention.memory(keys, values), 3.0)


MODELS = {"small": lambda: attention(8), "large": attention, "masked": Masked}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_export(kind, strict):
    model = MODELS[kind]()
    model(*inputs())
    of_call = getattr(model, "attention", model)
    before = of_call.attention_weights
    program = exported(model, strict=strict)
    assert of_call.attention_weights is before
    names = [str(node.target) for node in program.graph.nodes]
    assert names.count("bahdanau_fast.attention.default") == 1
    if kind != "masked":  # whose scores are clipped by a tanh
        assert not any("tanh" in name for name in names)
    for some in (inputs(), OTHER):
        close(program.module()(*some), model(*some))


@pytest.mark.parametrize("memory", [False, True])
def test_export_of_a_loop_that_reads_the_weights(memory):
    model = Decoder(memory)
    program = exported(model)
    close(program.module()(*OTHER), model(*OTHER))
    # A strict export cannot keep them: it says so, and nothing stale gets into the program.
    with pytest.raises(Exception, match="attention_weights is not kept"):
        exported(model, strict=True)


LOAD = """
import sys, torch, bahdanau_fast
inputs, want = torch.load(sys.argv[1])
program = torch.export.load(sys.argv[2]).module()
compiled = torch._inductor.aoti_load_package(sys.argv[3])
for run in (program, compiled):
    torch.testing.assert_close(run(*inputs), want, rtol=1e-5, atol=1e-6)
print("same numbers")
"""


@pytest.mark.thorough
def test_saved_and_compiled_ahead_of_time_for_a_fresh_process(tmp_path, monkeypatch):
    # With CI set, AOTInductor refuses any operator that has a decomposition too.
    monkeypatch.setenv("CI", "true")
    model = attention().requires_grad_(False)
    program = exported(model)
    files = [tmp_path / name for name in ("inputs.pt", "program.pt2", "compiled.pt2")]
    torch.save((OTHER, model(*OTHER)), files[0])
    torch.export.save(program, files[1])
    torch._inductor.aoti_compile_and_package(
        program,
        package_path=str(files[2]),
        inductor_configs={  # for one package, headers are not compiled beforehand
            "aot_inductor.compile_wrapper_opt_level": "O0",
            "aot_inductor.precompile_headers": False,
        },
    )
    assert python("-c", LOAD, *files).stdout.strip() == "same numbers"


def of_model(model):
    return {"model": model, "args": inputs(), "dynamic_shapes": DYNAMIC}


def of_program(model):
    """Of one that holds the operator."""
    return {"model": exported(model).run_decompositions(bf.decompositions.TABLE)}


@pytest.mark.parametrize("source", [of_model, of_program])
@pytest.mark.parametrize(
    "model",
    [attention(), attention(activation="leaky_relu"), Decoder(memory=True)],
    ids=["call", "leaky_relu", "loop"],
)
def test_onnx(model, source, tmp_path):
    runtime = pytest.importorskip("onnxruntime", reason="pip install onnxruntime")
    file = str(tmp_path / "model.onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about itself
        torch.onnx.export(**source(model), f=file, dynamo=True, verbose=False)
    session = runtime.InferenceSession(file)
    for some in (inputs(), OTHER):
        named = zip(session.get_inputs(), some, strict=True)
        got = session.run(None, {given.name: x.numpy() for given, x in named})
        want = model(*some)
        for one, other in zip(got, [want] if isinstance(want, torch.Tensor) else want, strict=True):
            close(torch.from_numpy(one), other)


def test_a_backend_by_name_is_not_for_onnx(tmp_path):
    pytest.importorskip("onnxscript", reason="pip install onnxscript")
    with bf.backends.use("cpu"), pytest.raises(Exception, match=r"bahdanau_fast\.attention"):
        torch.onnx.export(**of_model(attention()), f=str(tmp_path / "model.onnx"), dynamo=True)


def test_nothing_is_registered_for_compilers_to_find():
    assert [op for op in torch._decomp.decomposition_table if "bahdanau" in str(op)] == []
