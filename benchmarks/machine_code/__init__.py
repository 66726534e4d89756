"""What compilers made of the GPU kernels."""
