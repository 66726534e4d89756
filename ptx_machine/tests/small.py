"""Small PTX kernels for tests of the machine."""

from __future__ import annotations

import struct

import numpy as np

from ptx_machine import Buffer, Machine

HEAD = ".version 8.0\n.target sm_90a\n.address_size 64\n"
KINDS = {"f4": "f32", "f8": "f64", "u2": "u16", "f2": "b16"}
KINDS |= {"i4": "s32", "u4": "u32", "i8": "s64", "u8": "u64"}
TYPES = {np.dtype(name): kind for name, kind in KINDS.items()}
REGISTERS = (
    ".reg .pred %p<9>;\n.reg .b16 %h<9>;\n.reg .b32 %r<60>;\n.reg .f32 %f<9>;\n"
    ".reg .b64 %rd<30>;\n.reg .f64 %fd<9>;\n"
)


def kernel(body: str, params: int = 1, head: str = "") -> str:
    """A module with one entry ``k`` of so many 64-bit parameters, p0 and on, in %rd0 and on.

    %r0 is the thread's number in its block, %r1 the block's, %r2 the number of all.
    """
    listed = ", ".join(f".param .u64 p{k}" for k in range(params))
    loads = "\n".join(f"ld.param.u64 %rd{k}, [p{k}];" for k in range(params))
    own = (
        "mov.u32 %r0, %tid.x;\nmov.u32 %r1, %ctaid.x;\nmov.u32 %r2, %ntid.x;\n"
        "mad.lo.s32 %r2, %r1, %r2, %r0;\n"
    )
    return (
        f"{HEAD}{head}\n.visible .entry k({listed})\n{{\n{REGISTERS}{loads}\n{own}{body}\nret;\n}}"
    )


def run(text, buffers, grid=1, threads=32, **options):
    """Runs a module's entry ``k`` on arrays, which may also be Buffers; its races."""
    held = [b if isinstance(b, Buffer) else Buffer(f"p{k}", b) for k, b in enumerate(buffers)]
    params = struct.pack(f"<{len(held)}Q", *(b.address for b in held))
    return Machine(text).run("k", grid, threads, params, held, **options)


def applied(code: str, out, *inputs, **options):
    """What code makes of arrays element by element: %a, %b, ... are the inputs, %d the result.

    Args:
        code: PTX statements.
        out: dtype of the result.
        inputs: arrays of one length.
    """
    threads = len(inputs[0])
    result = np.zeros(threads, out)
    arrays = [np.ascontiguousarray(x) for x in inputs]
    declared, loaded = [f".reg .{TYPES[result.dtype]} %d;"], []
    for k, (letter, x) in enumerate(zip("abc"[: len(arrays)], arrays, strict=True)):
        kind, name = TYPES[x.dtype], f"%{letter}"
        declared.append(f".reg .{kind} {name};")
        size = x.dtype.itemsize
        loaded.append(
            f"mad.wide.u32 %rd10, %r2, {size}, %rd{k + 1};\nld.global.{kind} {name}, [%rd10];"
        )
    size = result.dtype.itemsize
    end = f"mad.wide.u32 %rd10, %r2, {size}, %rd0;\nst.global.{TYPES[result.dtype]} [%rd10], %d;"
    body = "\n".join([*declared, *loaded, code, end])
    run(kernel(body, 1 + len(arrays)), [result, *arrays], threads=threads, **options)
    return result
