#!/usr/bin/env bash
# torch.compile with ATEN_CPU_CAPABILITY=avx2, which chooses the kernels of torch, on a processor
# that has AVX-512, with GCC 12.
# Guess: only the speed changes. torch.where of integers that differ takes the other values: the
# code for AVX2 is compiled for the processor, and this compiler inverts its masks. The masks alone,
# and the same code when the compiler is told -mno-avx512f, are right.
set -euo pipefail
if [[ $(g++ -dumpversion) != 12 ]] || ! grep -qw avx512vl /proc/cpuinfo; then
  echo "needs GCC 12 and a processor with AVX-512"
  exit 0
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.13.0 numpy
printf '#!/bin/sh\nexec g++ "$@" -mno-avx512f\n' > "$folder/g++-without"
chmod +x "$folder/g++-without"
cat > "$folder/where.py" <<'END'
import torch

x = torch.arange(1, 9)


def function(x):
    return torch.where(x != 3, 10, x), x != 3


values, mask = torch.compile(function)(x)
print(torch.__version__, torch.backends.cpu.get_cpu_capability(), values.tolist())
assert torch.equal(mask, x != 3)
print("as eager" if torch.equal(values, function(x)[0]) else "not as eager")
END
cd "$folder"
run() { env TORCHINDUCTOR_CACHE_DIR="$(mktemp -d -p "$folder")" "$@" venv/bin/python where.py; }
g++ --version | head -1
run
run ATEN_CPU_CAPABILITY=avx2 | tee avx2
run ATEN_CPU_CAPABILITY=avx2 CXX="$folder/g++-without" | tee without
grep -q "^not as eager" avx2
grep -q "^as eager" without
# Output seen:
# g++ (Debian 12.2.0-14+deb12u1) 12.2.0
# 2.13.0+cpu AVX512 [10, 10, 3, 10, 10, 10, 10, 10]
# as eager
# 2.13.0+cpu AVX2 [1, 2, 10, 4, 5, 6, 7, 8]
# not as eager
# 2.13.0+cpu AVX2 [10, 10, 3, 10, 10, 10, 10, 10]
# as eager
