"""The host side of the CUDA kernels that needs no GPU: how weights are laid out for them."""
