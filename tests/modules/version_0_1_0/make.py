"""Writes the files beside it. They were made by the package of 0.1.0 (commit 42023f2).

PYTHONPATH=<checkout of that commit, kernels/ copied into bahdanau_fast/> python make.py
"""

import inspect
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).resolve().parent
PUBLIC = ("", ".backends", ".decompositions", ".functional", ".reference", ".seq2seq")
# In __all__ of a public module, but said to be internal by its docstring.
INTERNAL = {"attend_projected", "attend_small"}


def modules_of(bf):
    """One of every module, as `bf` makes it; sizes as in :func:`inputs_of`."""
    seq2seq = bf.seq2seq
    return {
        "additive": bf.AdditiveAttention(6, 5, 8, 0.1, bias=True),
        "additive_lazy": bf.AdditiveAttention(8, 0.1),
        "mlp": bf.MLPAttention(8, 6, 0.1),
        "dot": bf.DotProductAttention(0.1),
        "gru": bf.AttentionGRU(4, 6, num_layers=2, batch_first=True),
        "lstm": bf.AttentionLSTM(4, 6, value_size=3, num_hiddens=8),
        "translator": seq2seq.EncoderDecoder(
            seq2seq.Seq2SeqEncoder(11, 4, 6, 2, 0.1),
            seq2seq.Seq2SeqAttentionDecoder(11, 4, 6, 2, 0.1),
        ),
        "plain_translator": seq2seq.EncoderDecoder(
            seq2seq.Seq2SeqEncoder(11, 4, 6, 1), seq2seq.Seq2SeqDecoder(11, 4, 6, 1)
        ),
    }


def inputs_of(name):
    """What the module of that name is called with."""
    lens = torch.tensor([3, 7])
    if name in ("gru", "lstm"):
        steps = torch.randn(2, 5, 4) if name == "gru" else torch.randn(5, 2, 4)
        values = torch.randn(2, 7, 6 if name == "gru" else 3)
        return steps, None, torch.randn(2, 7, 6), values, lens
    if "translator" in name:
        return torch.randint(11, (2, 7)), torch.randint(11, (2, 5)), lens
    queries = torch.randn(2, 3, 5 if "additive" in name else 6)
    return queries, torch.randn(2, 7, 6), torch.randn(2, 7, 4), lens


def flat(results):
    """The tensors in a module's result, in order."""
    if isinstance(results, torch.Tensor):
        return [results]
    return [x for part in results if part is not None for x in flat(part)]


def parameters_of(function):
    """[name, kind, default] of every parameter; None for what has no signature."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    return [
        [p.name, p.kind.name, None if p.default is p.empty else repr(p.default)]
        for p in signature.parameters.values()
    ]


def signatures(module):
    """Public names of a module, each with its parameters; of a class those of its methods."""
    found = {}
    for name in module.__all__:
        value = getattr(module, name)
        if name in INTERNAL:
            continue
        found[name] = parameters_of(value) if callable(value) else None
        if not inspect.isclass(value):
            continue
        for cls in value.__mro__:
            if not cls.__module__.startswith("bahdanau_fast"):
                continue
            for method, body in vars(cls).items():
                if not method.startswith("_") and callable(getattr(value, method)):
                    found[f"{name}.{method}"] = parameters_of(getattr(value, method))
                elif isinstance(body, property) and not method.startswith("_"):
                    found[f"{name}.{method}"] = None
    return found


def train(bf):
    """A checkpoint of a short training, and what its model makes of some sentences."""
    from bahdanau_fast.seq2seq.corpus import TextSettings
    from bahdanau_fast.seq2seq.runs import Run

    digits = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    sentences = [" ".join(digits[int(d)] for d in str(n)) for n in range(100, 420)]
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        lines = [f"{text}\t{' '.join(str(100 + n))}\n" for n, text in enumerate(sentences)]
        Path("numbers.tsv").write_text("".join(lines))
        settings = bf.seq2seq.Settings(
            embed_size=8, num_hiddens=12, num_layers=1, dropout=0, epochs=10, batch_size=16, lr=1e-2
        )
        text = TextSettings("numbers.tsv", min_freq=1, num_steps=8, validation=0.1, test=0.1)
        run = Run(Path("out"), settings, text)
        run.train(progress=False)
        shutil.copy(bf.seq2seq.checkpoints.find(run.out), HERE / "checkpoint.pt")
        os.chdir(before)
    sentences = sentences[::40]
    written = bf.seq2seq.Translator.load(HERE / "checkpoint.pt").translate(sentences)
    return {
        "inputs": sentences,
        "results": [" ".join(translation.tokens) for translation in written],
        "weights": [translation.weights for translation in written],
    }


def main():
    import bahdanau_fast as bf
    import bahdanau_fast.seq2seq

    torch.manual_seed(0)
    tensors = {"checkpoint": train(bf)}
    for name, module in modules_of(bf).items():
        inputs = inputs_of(name)
        module.eval()
        module(*inputs)  # lazy layers get their weights
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.5)
        results = [x.detach() for x in flat(module(*inputs))]
        tensors[name] = {"inputs": inputs, "results": results, "state": module.state_dict()}
        torch.save(module, HERE / f"{name}.pt")
        if name == "additive":
            queries, keys, values, lens = inputs
            many = keys.repeat(1, 10, 1), values.repeat(1, 10, 1)
            with torch.no_grad():
                for kind, source in (("memory", (keys, values)), ("memory_of_many", many)):
                    memory = module.memory(*source, lens)
                    results = [module.attend(queries, memory), module.attention_weights]
                    tensors[kind] = {"inputs": (queries,), "results": results}
                    torch.save(memory, HERE / f"{kind}.pt")
    torch.save(bf.AdditiveAttention(8, 0.1), HERE / "additive_uncalled.pt")
    torch.save(tensors, HERE / "tensors.pt")
    names = {
        f"bahdanau_fast{part}": signatures(sys.modules[f"bahdanau_fast{part}"]) for part in PUBLIC
    }
    lines = [f' "{module}": {{\n{_lines(found)}\n }}' for module, found in names.items()]
    (HERE / "names.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _lines(found):
    return ",\n".join(f'  "{name}": {json.dumps(value)}' for name, value in found.items())


if __name__ == "__main__":
    main()
