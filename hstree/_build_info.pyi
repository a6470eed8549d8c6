"""Written by setup.py when the package is built."""

version: str
torch: str
torch_target: str
cuda: str | None
cuda_arch_list: str | None
cpu_only: str | None
compiler: str
python: str
