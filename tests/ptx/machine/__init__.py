"""A machine that runs PTX without a GPU, for tests: see docs/ptx.md."""
