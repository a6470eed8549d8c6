"""Every op in a few lines of PyTorch: the definitions that the tests compare the kernels with."""
