"""PTX on a CPU: the text of a kernel becomes a Python function that runs one thread of it.

Knows the instructions that the copy kernel is made of. A register holds an unsigned number of its width; what is read
as a signed type is decoded there, and results are cut to the width of their register.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

RESULTS = {
    "add": "{0} + {1}",
    "and": "{0} & {1}",
    "createpolicy": "0",
    "cvt": "{0}",
    "cvta": "{0}",
    "div": "quotient({0}, {1})",
    "mov": "{0}",
    "mul": "{0} * {1}",
    "not": "~{0}",
    "or": "{0} | {1}",
    "rem": "{0} - {1} * quotient({0}, {1})",
    "selp": "{0} if {2} else {1}",
    "shl": "{0} << {1}",
    "shr": "{0} >> {1}",
    "sub": "{0} - {1}",
    "xor": "{0} ^ {1}",
}
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
SPECIAL = {"%tid.x": "tid", "%ntid.x": "ntid", "%ctaid.x": "ctaid", "%nctaid.x": "nctaid"}


class WrongAccess(Exception):
    """An access that a GPU would refuse, or that touches what is not this copy's."""


@dataclass
class GpuMemory:
    """What a kernel may touch: arrays at their own addresses."""

    read_only: Sequence[np.ndarray]
    writable: Sequence[np.ndarray]
    widths: set[int] = field(default_factory=set)
    """Bytes per access of the stores so far."""

    def load(self, address: int, size: int) -> int:
        view, at = self._find(address, size, [*self.writable, *self.read_only])
        return int.from_bytes(view[at : at + size], "little")

    def store(self, address: int, size: int, value: int) -> None:
        view, at = self._find(address, size, self.writable)
        view[at : at + size] = value.to_bytes(size, "little")
        self.widths.add(size)

    def _find(self, address: int, size: int, arrays: Sequence[np.ndarray]) -> tuple[memoryview, int]:
        if address % size:
            raise WrongAccess(f"{size} bytes at {address:#x} are off their border")
        for array in arrays:
            at = address - array.ctypes.data
            if 0 <= at <= array.nbytes - size:
                return memoryview(array).cast("B"), at
        raise WrongAccess(f"{size} bytes at {address:#x} are outside")


@dataclass
class Kernel:
    """The only kernel of a PTX text."""

    parameter_bytes: int
    blocks: dict[str, list[str]]
    """Its basic blocks, as Python."""
    ran: set[str]
    """Names of those that ran."""
    _thread: Callable[..., None]

    @classmethod
    def of(cls, text: str) -> Kernel:
        parameter = re.search(r"\.param [^\n]* (\w+)\[(\d+)\]", text)
        assert parameter is not None
        body = text[text.index("{") + 1 : text.rindex("}")].replace(parameter[1], "0")
        blocks, ran = _basic_blocks(body), set()
        space = {"quotient": _quotient, "begin": ran.add}
        exec(_python(blocks), space)  # the text comes from this repository
        return cls(int(parameter[2]), blocks, ran, space["thread"])

    def run(self, parameters: bytes, memory: GpuMemory, *, groups: int, threads: int, rng: np.random.Generator) -> None:
        """One launch, its threads one by one in random order. Raises `WrongAccess`."""
        assert len(parameters) == self.parameter_bytes
        for number in rng.permutation(groups * threads).tolist():
            group, thread = divmod(number, threads)
            self._thread(thread, threads, group, groups, parameters, memory.load, memory.store)


def _quotient(a: int, b: int) -> int:
    """Towards zero, as a GPU divides."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _basic_blocks(body: str) -> dict[str, list[str]]:
    """Begin at a label or behind a branch; `at` is the next one."""
    blocks: dict[str, list[str]] = {}
    label = "first"
    for instruction in [label, *_instructions(body)]:
        is_label = instruction == label or instruction.startswith("$")
        if not is_label:
            blocks[label].append(_statement(instruction))
        if is_label or " bra" in f" {instruction}":
            following = instruction if is_label else f"after {len(blocks)}"
            if blocks:
                blocks[label].append(f"at = {following!r}")
            label = following
            blocks[label] = []
    return blocks


def _python(blocks: dict[str, list[str]]) -> str:
    code = ["def thread(tid, ntid, ctaid, nctaid, parameters, load, store):", " at = 'first'", " while True:"]
    for label, statements in blocks.items():
        code += [f"  if at == {label!r}:", f"   begin({label!r})", *(f"   {statement}" for statement in statements)]
    return "\n".join(code)


def _instructions(body: str) -> list[str]:
    """And labels, which stand on lines of their own."""
    lines = re.sub(r"//[^\n]*", "", body).replace(":\n", ":;").split(";")
    lines = [" ".join(line.split()) for line in lines]
    return [line.removesuffix(":") for line in lines if line and not line.startswith(".reg")]


def _statement(instruction: str) -> str:
    condition = ""
    if instruction.startswith("@"):
        predicate, instruction = instruction.split(" ", 1)
        condition = f"if {'not ' if predicate[1] == '!' else ''}{_name(predicate.lstrip('@!'))}: "
    opcode, _, operands = instruction.partition(" ")
    verb, *suffixes = opcode.split(".")
    if verb == "ret":
        return f"{condition}return"
    if verb == "bra":
        return f"{condition}at = {operands!r}; continue"
    if verb in ("ld", "st"):
        return condition + _access(verb, suffixes, operands)
    target, *sources = (each.strip() for each in operands.split(","))
    values = [_read(source, suffixes[-1]) for source in sources]
    if verb == "setp":
        return f"{condition}{_name(target)} = {values[0]} {COMPARISONS[suffixes[0]]} {values[1]}"
    assert verb in RESULTS, f"no such instruction here: {instruction}"
    mask = _mask(64 if target.startswith("%rd") else 32)
    return f"{condition}{_name(target)} = ({RESULTS[verb].format(*values)}) & {mask}"


def _access(verb: str, suffixes: list[str], operands: str) -> str:
    """A vector's registers stand in braces; what follows the address of one is its cache policy."""
    (address,) = re.findall(r"\[(.*?)\]", operands)
    base, _, offset = address.partition("+")
    place = f"{_name(base)} + {offset or 0}"
    vector = re.findall(r"\{(.*?)\}", operands)
    names = [_name(each) for each in re.findall(r"%\w+", vector[0] if vector else operands.replace(address, ""))]
    bits = int(suffixes[-1][1:])
    size, parts = bits // 8 * len(names), [(name, bits * i) for i, name in enumerate(names)]
    if verb == "st":
        value = " | ".join(f"({name} & {_mask(bits)}) << {shift}" for name, shift in parts)
        return f"store({place}, {size}, {value})"
    loaded = (
        f"int.from_bytes(parameters[{place}:][:{size}], 'little')" if "param" in suffixes else f"load({place}, {size})"
    )
    return "; ".join([f"loaded = {loaded}", *(f"{name} = loaded >> {shift} & {_mask(bits)}" for name, shift in parts)])


def _name(register: str) -> str:
    return SPECIAL.get(register) or register.removeprefix("%")


def _read(operand: str, kind: str) -> str:
    if not operand.startswith("%"):
        return f"({operand})"
    sign = 1 << (int(kind[1:]) - 1)
    return f"(({_name(operand)} ^ {sign}) - {sign})" if kind[0] == "s" else _name(operand)


def _mask(bits: int) -> int:
    return (1 << bits) - 1
