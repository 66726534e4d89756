"""How often a run calls operators, and projects keys."""

from torch.profiler import profile


def counts(function):
    """How often each operator of the package ran."""
    with profile() as record:
        function()
    return {
        event.key.split("::")[-1]: event.count
        for event in record.key_averages()
        if "bahdanau" in event.key
    }


def projections(run, shape):
    """How many products of the key weight with keys of a shape a run makes."""
    with profile(record_shapes=True) as record:
        run()
    return sum(
        event.name == "aten::linear" and list(shape) in event.input_shapes
        for event in record.events()
    )
