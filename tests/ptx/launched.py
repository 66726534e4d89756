"""Calls of attention whose launches go to the PTX machine."""

from __future__ import annotations

from calls import Calls
from machine.launch import Machine
from machine.parse import PtxError

__all__ = ["PtxCalls"]


class PtxCalls(Calls):
    """The kernels of a backend for an architecture.

    Args:
        arch: as the backend names it.
        change: of the PTX, to plant a mistake.
        options: for every ``Machine.run``.
    """

    def __init__(self, arch, change=str, **options):
        self.arch, self.change, self.options = arch, change, options
        self._launched = set()
        self._machines = {}

    def machine(self, key, ptx):
        """The machine of a module, whose text is ``ptx()``."""
        if key not in self._machines:
            self._machines[key] = Machine(self.change(ptx()))
        return self._machines[key]

    def run(self, machine, name, *launch, **more):
        """One launch, without races."""
        report = machine.run(name, *launch, **more, **self.options)
        self._launched.add((self.kind, name))
        if report.races:
            raise PtxError("\n".join(report.races))

    def took(self):
        """(kind, entry) of every launch since the last call."""
        launched, self._launched = self._launched, set()
        return launched
