"""The instructions that turn codes into float16, executed here one by one on every unit there is."""

import re

import pytest
import torch
from bladellm_kernels.kv_format import KV_FORMATS
from bladellm_kernels.kv_read import dequantize_kv

ASSEMBLY = {
    "int8": "_INT8", "int8_affine": "_UINT8", "int4": "_UINT4", "int4_affine": "_UINT4",
    "fp8_e4m3": "_E4M3", "fp8_e5m2": "_E5M2",
}  # fmt: skip
OFFSET = {"int8": 128, "int4": 8}
"""By which the kernel's codes, counted from 0 on, are higher than numbers."""
WORD = 0xFFFFFFFF


def halves(register):
    """The two float16 of a register, in float64."""
    both = torch.stack((register & 0xFFFF, register >> 16), -1)
    return both.to(torch.uint16).view(torch.float16).double()


def register(numbers):
    """Two float16 from float64, rounded, as a register."""
    both = numbers.to(torch.float16).view(torch.uint16).long()
    return both[..., 0] | both[..., 1] << 16


def lop3(a, b, c, table):
    """Bit by bit, the table's bit 4a + 2b + c."""
    result = torch.zeros_like(a)
    for index in range(8):
        if table >> index & 1:
            terms = [x if index >> place & 1 else ~x for x, place in ((a, 2), (b, 1), (c, 0))]
            result |= terms[0] & terms[1] & terms[2]
    return result & WORD


def permuted(a, b, selector):
    bytes_of = [a >> 8 * i & 255 for i in range(4)] + [b >> 8 * i & 255 for i in range(4)]
    return sum(bytes_of[selector >> 4 * i & 7] << 8 * i for i in range(4))


def widened(pair):
    """Two float8_e4m3fn of 16 bits as a register of float16."""
    both = torch.stack((pair & 255, pair >> 8 & 255), -1).to(torch.uint8).view(torch.float8_e4m3fn)
    return register(both.double())


def execute(assembly, outputs, *units):
    """PTX on registers of two units each, int64 [N], one for each word; returns the output registers."""
    values = {f"${outputs + place}": each for place, each in enumerate(units)}

    def operand(text):
        return values[text] if text in values else torch.full_like(units[0], int(text, 0))

    for line in re.findall(r"^\s*(\S[^;{}]*(?:\{[^}]*\}[^;{}]*)?);", assembly.replace("{\n", "\n", 1), re.M):
        name, rest = line.split(None, 1)
        if name == ".reg":
            continue
        if rest.startswith("{"):
            names, source = re.fullmatch(r"\{(.*)\}, (\S+)", rest).groups()
            low, high = names.split(", ")
            values[low], values[high] = operand(source) & 0xFFFF, operand(source) >> 16
            continue
        target, *sources = rest.split(", ")
        given = [operand(source) for source in sources]
        values[target] = {
            "mov.b32": lambda a: a,
            "shr.u32": lambda a, b: a >> b,
            "shl.b32": lambda a, b: a << b & WORD,
            "and.b32": lambda a, b: a & b,
            "or.b32": lambda a, b: a | b,
            "xor.b32": lambda a, b: a ^ b,
            "lop3.b32": lambda a, b, c, table: lop3(a, b, c, int(table[0])),
            "prmt.b32": lambda a, b, selector: permuted(a, b, int(selector[0])),
            "sub.f16x2": lambda a, b: register(halves(a) - halves(b)),
            "fma.rn.f16x2": lambda a, b, c: register(halves(a) * halves(b) + halves(c)),
            "cvt.rn.f16x2.e4m3x2": widened,
        }[name](*given)
    return [values[f"${index}"] for index in range(outputs)]


def all_units():
    """Every unit there is, as the lower one and as the upper one of registers."""
    first = torch.arange(65536)
    return first, first[torch.randperm(65536)]


@pytest.mark.parametrize("format_name", ASSEMBLY)
def test_every_code_becomes_its_number(format_name):
    pytest.importorskip("triton")
    from bladellm_kernels import kv_codes_triton as module

    kv_format = KV_FORMATS[format_name]
    step = 1.0 if format_name.startswith("fp8") else 2.0**-24
    first, second = all_units()
    per_byte = 8 // kv_format.bits
    parts = execute(getattr(module, ASSEMBLY[format_name]).value, 2 * per_byte, first | second << 16)
    for place, units in enumerate((first, second)):
        codes = torch.stack((units & 255, units >> 8), -1).to(torch.uint8).view(kv_format.storage)
        scales = torch.tensor([1.0, 0.0][: kv_format.planes]).half()
        # Two bytes of a head of four numbers, or of two.
        expected = dequantize_kv(codes, scales, kv_format)
        for part, found in enumerate(parts):
            number = part // per_byte + part % per_byte * 2 if per_byte == 2 else part
            weight = 16 if per_byte == 2 and part % 2 else 1
            numbers = halves(found)[:, place] / (step * weight) - OFFSET.get(format_name, 0)
            torch.testing.assert_close(numbers.float(), expected[:, number], atol=0, rtol=0, equal_nan=True)


def test_the_last_part_of_4_bit_values_is_the_whole_byte():
    pytest.importorskip("triton")
    from bladellm_kernels import kv_codes_triton as module

    first, second = all_units()
    register = first | second << 16
    keys, values = (execute(getattr(module, name).value, 4, register) for name in ("_UINT4", "_UINT4_BYTE"))
    for key, value in zip(keys[:3], values[:3], strict=True):
        assert torch.equal(key, value)
    assert torch.equal(halves(values[3]), halves(keys[3]) + halves(keys[2]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_code_of_12_bits_becomes_its_number(dtype):
    """Every word beside random other ones, in both halves of registers: bytes 2i and 2i + 1 of two halves of a head."""
    pytest.importorskip("triton")
    from bladellm_kernels import kv_codes_triton as module

    words = [torch.randperm(65536) for _ in range(6)]
    registers = [words[each] | words[3 + each] << 16 for each in range(3)]
    parts = execute(module._FP12.value, 4, *registers)
    if dtype == torch.float16:
        parts = [execute(module._BRAIN_TO_HALF.value, 1, part)[0] for part in parts]
    step = 2.0**-112 if dtype == torch.bfloat16 else 1.0
    for place in range(2):
        stored = torch.stack([words[3 * place + each] >> 8 * byte & 255 for each in range(3) for byte in range(2)], -1)
        expected = dequantize_kv(stored.to(torch.uint8), torch.ones(1).half(), KV_FORMATS["fp12_e4m7"])
        for part, found in enumerate(parts):
            numbers = (found >> 16 * place & 0xFFFF).to(torch.uint16).view(dtype).double() / step
            torch.testing.assert_close(numbers.float(), expected[:, part // 2 + part % 2 * 2], atol=0, rtol=0)
