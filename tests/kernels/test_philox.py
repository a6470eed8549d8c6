"""csrc/kernels/philox.h."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest
from cuda_emu.library import CSRC

from kernels.random_numbers import KNOWN_ANSWERS, philox, uniform

HEADER = """
#include "kernels/philox.h"
constexpr bool is(hstree::PhiloxCounter c, uint32_t a, uint32_t b, uint32_t d, uint32_t e) {
  return c.word[0] == a && c.word[1] == b && c.word[2] == d && c.word[3] == e;
}
"""
DRAWS = ((0, 0, 0), (2**63 - 1, 2**40 + 7, 64), (3, 5, 1))  # seed, draw, step


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_known_answers_in_python(
    counter: tuple[int, ...], key: tuple[int, int], output: tuple[int, ...]
) -> None:
    assert philox(counter, key) == output


def test_header_gives_the_known_answers(compiler: str) -> None:
    """At compile time, under the language standard of the build."""
    source = HEADER
    for counter, key, output in KNOWN_ANSWERS:
        words = (", ".join(f"{word}u" for word in of) for of in (counter, output))
        state, expected = words
        number = key[0] | key[1] << 32
        source += f"static_assert(is(hstree::philox({{{{{state}}}}}, {number}ull), {expected}));\n"
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
