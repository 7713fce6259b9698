"""Digests of parameters that mean the same on both sides of a push (SYNC-06).

A parameter is a matrix here (`matrix_shape`), whatever fused, sharded or packed form an
engine keeps it in. Its digest is a sum over the elements (r, c) that were asked for:

    sum of bits(r, c) * multiplier(r * columns + c)   modulo 2**64

`bits` is the element's bit pattern as a signed integer of its width, and 0 for what a matrix
product need not keep (`countable_bits`). The multipliers are odd and scattered (the finalizer
of SplitMix64, Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014), so an element that differs and elements that trade places are seen, and a sum
over parts of a parameter can be put together.

This module imports no array library: `multipliers` works on any array of signed 64-bit
integers whose arithmetic wraps around, such as torch's.
"""

import math
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from shared_contracts.weights import DtypeName, ParameterMeta

Int64Array: TypeAlias = Any

SAMPLED_COLUMNS = 4

_EXPONENT_BITS: dict[DtypeName, int] = {
    "float64": 0x7FF0000000000000,
    "float32": 0x7F800000,
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
}

# The number of a layer within a parameter's name.
LAYER_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, columns): the first dimension, and all others flattened; a vector is a column."""
    return (shape[0] if shape else 1), math.prod(shape[1:])


def multipliers(positions: Int64Array) -> Int64Array:
    """Odd pseudorandom multipliers of flat element positions (r * columns + c)."""
    x = positions * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return (x ^ _shifted(x, 31)) | 1


def countable_bits(bits: Int64Array, dtype: DtypeName) -> Int64Array:
    """`bits` of elements of type `dtype`, with 0 for zeros of either sign and denormals.

    An engine may keep a matrix in a form that can only be read by multiplying with it, which
    need not preserve those.
    """
    exponent = _EXPONENT_BITS.get(dtype)
    return bits if exponent is None else bits * ((bits & exponent) != 0)


def written(total: int) -> str:
    """A sum as the 16 hexadecimal digits of a `ParameterDigest`."""
    return f"{total & 0xFFFFFFFFFFFFFFFF:016x}"


def sample(parameters: Iterable[ParameterMeta], version: int) -> dict[str, list[int]]:
    """Which columns of which parameters a push of `version` verifies: name -> ascending columns.

    One parameter of every kind (`...layers.*.mlp.up_proj.weight`) and up to
    `SAMPLED_COLUMNS` columns of it; another choice with every version, and the same choice
    wherever it is made.
    """
    kinds: dict[str, list[ParameterMeta]] = defaultdict(list)
    for parameter in parameters:
        kinds[LAYER_INDEX.sub("*", parameter.name)].append(parameter)
    chosen = {}
    for kind, members in kinds.items():
        dice = random.Random(f"{kind} {version}")
        parameter = dice.choice(members)
        _, columns = matrix_shape(parameter.shape)
        chosen[parameter.name] = sorted(dice.sample(range(columns), min(SAMPLED_COLUMNS, columns)))
    return chosen


def _signed(constant: int) -> int:
    return constant - 2**64 if constant >= 2**63 else constant


def _shifted(x: Int64Array, bits: int) -> Int64Array:
    """A shift to the right that brings in zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
