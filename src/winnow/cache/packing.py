"""Codes of fewer than 8 bits in bytes, and the Hadamard transform, in plain torch: the oracle of every kernel.

Codes are packed within a group of g channels, g a multiple of 8, so that a vector register that holds bytes side by
side gives channels side by side by one mask or one shift. With c the code of a channel of the group:

    4 bits, g/2 bytes: byte j =  c[j]            low nibble
                              |  c[j + g/2] << 4
    2 bits, g/4 bytes: byte j =  c[j]
                              |  c[j + g/4] << 2
                              |  c[j + g/2] << 4
                              |  c[j + 3g/4] << 6
    3 bits, 3g/8 bytes: first a plane of the low two bits, c & 3, packed as 2 bits are (g/4 bytes), then a plane of the
                        high bit, c >> 2 (g/8 bytes): bit i of its byte j is that of channel i * g/8 + j.
    8 bits: byte j = c[j].

Groups follow each other.
"""

import torch
from torch import Tensor


def pack(code: Tensor, bits: int, group: int) -> Tensor:
    """Pack codes, uint8 [..., d] below 2**bits, in groups of `group` channels: uint8 [..., d * bits / 8]."""
    grouped = code.unflatten(-1, (-1, group))
    if bits == 3:
        planes = [_interleave(grouped & 3, 2), _interleave(grouped >> 2, 1)]
        return torch.cat(planes, dim=-1).flatten(-2)
    return _interleave(grouped, bits).flatten(-2)


def unpack(packed: Tensor, bits: int, group: int) -> Tensor:
    grouped = packed.unflatten(-1, (-1, group * bits // 8))
    if bits == 3:
        low, high = grouped.split([group // 4, group // 8], dim=-1)
        return (_spread(low, 2) | (_spread(high, 1) << 2)).flatten(-2)
    return _spread(grouped, bits).flatten(-2)


def _interleave(code: Tensor, bits: int) -> Tensor:
    """Return codes [..., g] as bytes [..., g * bits / 8]: channel i * n + j in byte j of the n, from bit i * bits."""
    parts = code.chunk(8 // bits, dim=-1)
    packed = parts[0].clone()
    for i, part in enumerate(parts[1:], start=1):
        packed |= part << (i * bits)
    return packed


def _spread(packed: Tensor, bits: int) -> Tensor:
    mask = 2**bits - 1
    return torch.cat([(packed >> (i * bits)) & mask for i in range(8 // bits)], dim=-1)


def hadamard(x: Tensor, block: int) -> Tensor:
    """Return the orthonormal Walsh-Hadamard transform of each `block` channels, a power of two, of x, [..., d].

    In float32, in the natural (Sylvester) order: for h = 1, 2, 4, ... below `block`, each pair of channels i and i + h
    with i & h == 0 becomes (a + b, a - b); then all are multiplied by block ** -0.5, rounded to float32. It is its own
    inverse.
    """
    y = x.float().unflatten(-1, (-1, block))
    h = 1
    while h < block:
        pairs = y.unflatten(-1, (-1, 2, h))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack([a + b, a - b], dim=-2).flatten(-3)
        h *= 2
    return (y * block**-0.5).flatten(-2)
