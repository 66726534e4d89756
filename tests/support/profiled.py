"""How often a run calls operators, and projects keys; what it allocates."""

from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Notes torch's operations, and what they are called with by name."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, kwargs or {}))
        return func(*args, **(kwargs or {}))


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


def allocated(call):
    """Bytes that torch's allocator gave out (above 0) and took back during a call, in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        result = call()
    del result
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
