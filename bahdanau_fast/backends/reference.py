"""The reference as a backend: plain PyTorch operations, whatever the device and dtype."""

from __future__ import annotations

from bahdanau_fast.backends.backend import Backend, Facts


class Reference(Backend):
    """Serves every call."""

    name, device, fused = "reference", None, False
    serves, takes_fp64 = "plain PyTorch, any device", True

    def form(self, facts: Facts) -> tuple[str, str]:
        """Its own, and why."""
        requested = facts.requested == self.name
        return self.name, "as requested" if requested else "no kernels serve it"


REFERENCE = Reference()
