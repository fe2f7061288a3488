"""Instructions that turn codes into bfloat16 in kernels, carried out here: the interpreter does not run them."""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from winnow.attention.triton.kernels import codec


def program_of(kernel: Any) -> str:
    """The PTX in a kernel's source."""
    [found] = re.findall(r"\{(.*?)\}", inspect.getsource(kernel.fn), flags=re.DOTALL)
    return str(found)


def run(program: str, arguments: Sequence[int], results: int) -> list[int]:
    """Registers $0 and on after a program whose further registers, of 32 bits, hold the arguments."""
    registers = {f"${results + number}": value for number, value in enumerate(arguments)}
    for line in filter(None, map(str.strip, program.split(";"))):
        name, _, operands = line.partition(" ")
        if name == ".reg":
            continue
        target, *rest = (each.strip() for each in operands.split(","))
        values = [registers[each] if each in registers else int(each, 16) for each in rest]
        registers[target] = OPERATIONS[name](*values)
    return [registers[f"${number}"] for number in range(results)]


def permuted(low: int, high: int, order: int) -> int:
    data = low.to_bytes(4, "little") + high.to_bytes(4, "little")
    return int.from_bytes(bytes(data[order >> 4 * place & 7] for place in range(4)), "little")


def looked_up(a: int, b: int, c: int, table: int) -> int:
    bits = (table >> ((a >> n & 1) << 2 | (b >> n & 1) << 1 | (c >> n & 1)) & 1 for n in range(32))
    return sum(bit << n for n, bit in enumerate(bits))


def multiplied(x: int, y: int, z: int) -> int:
    """x * y + z of two bfloat16 each, rounded once."""
    a, b, c = (halves(each).double() for each in (x, y, z))
    return word((a * b + c).to(torch.bfloat16))


def halves(value: int) -> Tensor:
    return torch.from_numpy(np.array([value], dtype=np.uint32).view(np.int16)).view(torch.bfloat16)


def word(pair: Tensor) -> int:
    return int(pair.view(torch.int16).numpy().view(np.uint32)[0])


OPERATIONS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": permuted,
    "lop3.b32": looked_up,
    "fma.rn.bf16x2": multiplied,
}


def converted(kernel: Any, codes: Sequence[int], *more: int) -> Tensor:
    """Four codes as bfloat16."""
    first, second = run(program_of(kernel), [int.from_bytes(bytes(codes), "little"), *more], results=2)
    return torch.cat([halves(first), halves(second)])


FOURS = [range(first, first + 4) for first in range(0, 256, 4)]


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [(codec.bfloat16_of_int8, torch.int8), (codec.bfloat16_of_e4m3, torch.float8_e4m3fn)],
    ids=["int8", "e4m3"],
)
def test_every_byte(kernel: Any, dtype: torch.dtype) -> None:
    for codes in FOURS:
        expected = torch.tensor(list(codes), dtype=torch.uint8).view(dtype).to(torch.bfloat16)
        real = ~expected.isnan()
        assert torch.equal(converted(kernel, codes)[real], expected[real]), codes


@pytest.mark.parametrize("shift", [0, 4])
def test_every_nibble(shift: int) -> None:
    """Each with a scale and a minimum of its own."""
    scales = torch.tensor([0.5, 0.0371, 3.0, 1e-3], dtype=torch.bfloat16)
    least = torch.tensor([-4.0, 0.11, -20.5, 7.0], dtype=torch.bfloat16)
    pairs = [word(each) for both in (scales, least) for each in (both[:2].clone(), both[2:].clone())]
    for codes in FOURS:
        code = torch.tensor([each >> shift & 15 for each in codes]).double()
        found = converted(codec.bfloat16_of_nibbles, codes, shift * 0x01010101, *pairs)
        assert torch.equal(found, (code * scales.double() + least.double()).to(torch.bfloat16)), codes
