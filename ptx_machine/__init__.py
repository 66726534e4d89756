"""A machine that runs PTX without a GPU, for tests.

What only it proves: that the machine code which nvcc and Triton made computes what it should in any
order of blocks and warps, races nowhere, touches only its memory and reads nothing unwritten. It
does not say how long that takes, nor what hardware adds to PTX.

``parse.py`` reads a module, ``launch.py`` runs an entry on buffers. ``core``, in C++ (half of a
kernel's instructions are masked, which NumPy is slow at), has the instructions, each entered in
``opcodes()`` at the end of its part: integers.h, floats.h, loads.h, tensor_cores.h (``mma`` and
``wgmma``) and scheduler.h, which runs the warps. Those that our kernels have are there: another
opcode or modifier is an error that names it.

Threads: of a warp those that are furthest behind in the code run together. Shuffles and ``mma``
wait for the lanes of their mask, barriers for the block or the cluster; what never comes is an
error. Blocks (clusters) run one after another: in order, backwards or shuffled, warps likewise.
Those of a cooperative launch are there at once. A warp whose strong load (``ld.acquire``,
``ld.relaxed``, ``ld.volatile``) finds what it found before lets the others go on; where none can,
that is an error.

Memory: every access is checked for bounds and for the alignment of its width. Shared memory and
workspaces count as unwritten until a kernel writes them. Writing what the same launch reads as
constant (``ld.global.nc``) is an error. The shared memory of another block of a cluster may be
touched only between a cluster barrier after it began and one before it ends. What ``cp.async``
copies is unwritten until the wait.

Races: each cell, as wide as the kernel's narrowest store, remembers who wrote it last and two who
read it since, with the counts of barriers of block and cluster that each had passed. Two threads,
one of them writing, and no count in between: a race, whatever the order was. Shuffles order
nothing. Between blocks a fence and an atomic operation on the one side, and an atomic operation on
the same address and a fence on the other, order what came before and after them. Instead of the
fence the operation may release or acquire itself, and a strong load may acquire. ``ld.global.cg``
and ``ld.global.ca`` are loads like any other.

Approximations (``ex2``, ``rcp``, ``div.full``) are off by a random part of the error that the PTX
ISA documents; powers of two by ``ex2`` are exact, as NVIDIA's own ``tanh`` in fp64 needs. Sums of
``mma`` and ``wgmma`` are taken in fp64 and rounded once; tensor cores add in another order and
truncate.

Products of warpgroups (``wgmma``): results are there at once, but until ``wgmma.wait_group`` no
other instruction may touch the registers of a product, what it reads in shared memory is being
read, and one that touched its registers before asks for a ``wgmma.fence``. What ordinary stores
wrote there needs ``fence.proxy.async``, by the thread that stored, before the barrier, or by those
that read, after it. What ``cp.async`` copied needs none here: the PTX ISA does not except it, but
CUTLASS leaves the fence out there, and so does Triton.
"""
