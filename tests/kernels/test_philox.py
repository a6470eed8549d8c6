"""csrc/kernels/philox.h against reference, at compile time."""

from __future__ import annotations

import subprocess

import numpy as np
from cuda_emu.library import CSRC
from reference.sample import philox, uniform

HEADER = """
#include "kernels/philox.h"
constexpr bool is(hstree::PhiloxCounter c, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  return c.word[0] == x && c.word[1] == y && c.word[2] == z && c.word[3] == w;
}
"""
ONES = 2**32 - 1
COUNTERS = ((0, 0, 0, 0), (ONES, ONES, ONES, ONES), (0x243F6A88, 0x85A308D3, 0x13198A2E, 7))
KEYS = (0, 2**64 - 1, 0x299F31D0A4093822)
DRAWS = ((0, 0, 0), (2**64 - 1, 2**40 + 7, 64), (3, 5, 1))  # seed, draw, step


def test_header_equals_the_reference(compiler: str) -> None:
    source = HEADER
    for counter, key in zip(COUNTERS, KEYS, strict=True):
        words = (", ".join(f"{word}u" for word in of) for of in (counter, philox(counter, key)))
        start, result = words
        source += f"static_assert(is(hstree::philox({{{{{start}}}}}, {key}ull), {result}));\n"
    for seed, draw, step in DRAWS:
        value = uniform(seed, draw, step).hex()
        source += f"static_assert(hstree::uniform({seed}ull, {draw}ull, {step}u) == {value});\n"
    command = [compiler, "-std=c++17", "-Werror", f"-I{CSRC}", "-fsyntax-only", "-x", "c++", "-"]
    shown = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr


def test_uniform() -> None:
    """Mean, variance, and no correlation of neighbouring draws and steps; 5 standard deviations."""
    numbers = np.array([[uniform(11, draw, step) for step in range(50)] for draw in range(400)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    size = numbers.size
    assert abs(numbers.mean() - 0.5) < 5 * (1 / 12 / size) ** 0.5
    assert abs(numbers.var() - 1 / 12) < 5 * (1 / 180 / size) ** 0.5
    centred = numbers - 0.5
    for product in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1]):
        assert abs(product.mean()) < 5 / 12 / product.size**0.5
