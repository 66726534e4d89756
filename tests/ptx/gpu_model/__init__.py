"""A model of time for the GPU kernels. Whatever it gives is modelled, not measured."""
