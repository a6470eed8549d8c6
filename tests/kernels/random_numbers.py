"""The random numbers of csrc/kernels/philox.h in Python integers."""

from __future__ import annotations

WORD = 2**32 - 1

KNOWN_ANSWERS = (  # counter, key, output; kat_vectors of Random123
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD,) * 4, (WORD, WORD), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = b >> 32 ^ c1 ^ k0, b & WORD, a >> 32 ^ c3 ^ k1, a & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def uniform(seed: int, row_draw: int, step: int) -> float:
    """In [0, 1), of step ``step`` of draw ``row_draw``."""
    words = philox((row_draw & WORD, row_draw >> 32, step, 0), (seed & WORD, seed >> 32))
    return ((words[1] << 32 | words[0]) >> 11) * 2.0**-53
