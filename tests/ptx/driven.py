"""Runs csrc/cuda in the PTX machine, with the launches that its own launchers compute."""

from __future__ import annotations

import os
import struct
import subprocess
import tempfile
import threading

import numpy as np
from cuda_on_host import KINDS, Drivers, Host
from machine import build
from machine.launch import Buffer, Machine, Order, Report
from machine.parse import PtxError

__all__ = ["ARCHS", "CudaPtx", "PtxDrivers"]

# The largest cluster that launchers are told of.
ARCHS = {"80": 1, "90a": 8}


class CudaPtx(Host):
    """What ``cuda_on_host.attend`` asks: the driver of a kind, launching into the machine.

    Args:
        kind: a name from KINDS.
        arch: a key of ARCHS.
        change: of the PTX, to plant a mistake.
        less_shared: bytes of shared memory that launches lack, to plant one.
        clears: whether what a launcher sets to zero is.
        keeps: memory stays in the machine, all of it known: what the driver gives is not the
            kernels' results. Cheap where only counts are wanted.
        options: for every ``Machine.run``.

    Attributes:
        reports: of all launches.
    """

    def __init__(self, kind, arch, change=str, less_shared=0, clears=True, keeps=False, **options):
        self.messages = tempfile.TemporaryFile()  # noqa: SIM115  for as long as the driver
        self.machine = Machine(change(build.ptx(kind, arch)))
        self.options = {"order": Order.GIVEN, **options}
        self.less_shared, self.clears, self.keeps = less_shared, clears, keeps
        self.reports: list[Report] = []
        self._held: dict[int, Buffer] = {}
        self._fills: list[tuple[int, int]] = []  # set to zero since the last launch
        self._failure: BaseException | None = None
        self._start(kind)

    def _start(self, kind):
        out, self._their_out = os.pipe()
        self._their_in, back = os.pipe()
        self._from, self._to = os.fdopen(out, "rb"), os.fdopen(back, "wb")
        path = build.driver(kind, *KINDS[kind])
        fds = self._their_out, self._their_in

        self.process = subprocess.Popen(
            ["bash", "-c", f"exec {path} 3>&{fds[0]} 4<&{fds[1]}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.messages,
            pass_fds=fds,
            env=os.environ | ({"PTX_MACHINE_KEEPS": "1"} if self.keeps else {}),
        )
        os.close(self._their_out)
        os.close(self._their_in)
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self):
        super().close()
        self._from.close()
        self._to.close()

    def ask(self, request, shapes):
        """Send a request, receive tensors; raises what the machine said of a launch."""
        try:
            return super().ask(request, shapes)
        except AssertionError:
            if self._failure is None:
                raise
            raise self._failure from None

    def _serve(self):
        try:
            while head := self._from.read(56):
                self._launch(*struct.unpack("<7q", head))
        except ValueError:  # closed
            return
        except BaseException as error:
            self._failure = error
            self.process.kill()

    def _numbers(self, count):
        return struct.unpack(f"<{count}q", self._from.read(8 * count))

    def _launch(self, length, blocks, threads, shared, cluster, size, pieces):
        if length == 0:  # fill_zero
            address, count = blocks, threads
            return self._fill(address, count)
        name, params = self._from.read(length).decode(), self._from.read(size)
        before, self._held = self._held, {}
        for _ in range(pieces):
            serial, address, count, filled = self._numbers(4)
            held = before.get(serial)
            sent = not self.keeps or (filled and held is None)
            if held is None:
                known = bool(filled) or self.keeps
                held = Buffer(f"buffer {serial}", np.zeros(count, np.uint8), address, known)
                for at, bytes_ in self._fills:
                    self._mark(held, at, bytes_)
            if sent:
                held.data[:] = np.frombuffer(self._from.read(count), np.uint8)
            self._held[serial] = held
        buffers = list(self._held.values())
        self._fills.clear()
        self.run(name, blocks, threads, params, buffers, shared - self.less_shared, cluster)
        for data in [b"1"] if self.keeps else [held.data.tobytes() for held in buffers]:
            self._to.write(data)
        self._to.flush()

    def run(self, name, blocks, threads, params, buffers, shared, cluster):
        """One launch in the machine."""
        report = self.machine.run(
            name, blocks, threads, params, buffers, shared=shared, cluster=cluster, **self.options
        )
        self.reports.append(report)
        if report.races:
            raise PtxError("\n".join(race.text for race in report.races))

    def _fill(self, address, count):
        if not self.clears:
            return
        self._fills.append((address, count))
        for held in self._held.values():
            self._mark(held, address, count)

    @staticmethod
    def _mark(held, address, count):
        first = address - held.address
        if 0 <= first < held.known.size:
            held.known[first : first + count] = 1


class PtxDrivers(Drivers):
    """csrc/cuda for an architecture: drivers by kind of numbers, started when asked for.

    Args:
        arch: a key of ARCHS.
        options: for every ``CudaPtx``.
    """

    def __init__(self, arch, **options):
        super().__init__(lambda kind: CudaPtx(kind, arch, **options), ARCHS[arch])

    def took(self):
        """(kind, entry) of every launch since the last call."""
        found = {(kind, r.entry.name) for kind, driver in self.items() for r in driver.reports}
        for driver in self.values():
            driver.reports.clear()
        return found
