"""How many instructions a warp runs of a compiled kernel, found by following its code.

It reads the machine code (SASS) for sm_90 that `cuobjdump` prints. The whole numbers
that decide which way a thread goes are computed; what is read from memory or computed
in floating point is unknown, and a branch on it is refused. A warp runs an instruction
as often as the thread that runs it most often: both sides of a branch count where
threads part, and an instruction also counts where its predicate is false. Not counted
is how long a warp waits; and a division is taken to be of usual numbers, not of tiny
ones.
"""

from __future__ import annotations

import operator
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

PARAMETERS = 0x210  # where a kernel's parameters begin in the bank of constants
WARP = 32
WORD = 2**32 - 1

INSTRUCTION = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?(.+?)\s*;", re.M
)
WITHOUT_RESULT = (
    "BSSY BSYNC BREAK WARPSYNC NOP BAR STS STG LDGSTS LDGDEPBAR DEPBAR".split()
)
COMPARE: dict[str, Callable[[int, int], bool]] = {
    "LT": operator.lt,
    "LE": operator.le,
    "EQ": operator.eq,
    "NE": operator.ne,
    "GE": operator.ge,
    "GT": operator.gt,
}
# How many registers an operation writes, by its suffix.
RESULTS = {"64": 2, "128": 4, "16816": 4, "M88": 4, "MT88": 4, "WIDE": 2}

# By address: an operation, its suffixes, its predicate and its operands.
Code = dict[int, tuple[str, set[str], str, list[str]]]
Number = int | None  # None is unknown


def disassemble(cubin: Path, kernel: str) -> Code:
    command = ["cuobjdump", "-sass", "-fun", kernel, str(cubin)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    code: Code = {}
    for address, predicate, rest in INSTRUCTION.findall(text):
        operation, _, operands = rest.replace(".reuse", "").partition(" ")
        name, *suffixes = operation.split(".")
        parts = re.split(r", *", operands.strip())
        code[int(address, 16)] = name, {*suffixes}, predicate or "PT", parts
    return code


def count_instructions(code: Code, constants: dict[int, int], threads: int) -> float:
    """Return how many the warps of the first block run, on average.

    `constants` are by address the words of the bank of constants.
    """
    most: list[Counter[int]] = [Counter() for _ in range(threads // WARP)]
    for thread in range(threads):
        most[thread // WARP] |= Thread(code, constants, thread).run()
    return sum(counts.total() for counts in most) / len(most)


def signed(x: int) -> int:
    return x - 2**32 if x >> 31 else x


def known(function: Callable[..., int], *inputs: Number) -> Number:
    """Return the function's value, which is unknown where an input is."""
    return None if None in inputs else function(*inputs)


def product(a: Number, b: Number) -> Number:
    return 0 if 0 in (a, b) else known(operator.mul, a, b)


def joined(words: list[Number]) -> Number:
    return known(lambda *x: sum(w << 32 * i for i, w in enumerate(x)), *words)


def table(bits: str) -> Callable[[int, int, int], int]:
    """Return the function of three words, bit by bit, that a truth table describes."""

    def look_up(*words: int) -> int:
        out = 0
        for i in range(8):
            a, b, c = (x if i & 4 >> j else ~x for j, x in enumerate(words))
            out |= a & b & c if int(bits, 16) >> i & 1 else 0
        return out & WORD

    return look_up


def registers(name: str, count: int) -> list[str]:
    """Return a register's name, and those of the next ones."""
    kind, index = re.findall(r"^(U?[RP])(\w+)$", name)[0]
    numbered = index.isdigit()
    return [f"{kind}{int(index) + i}" if numbered else name for i in range(count)]


class Thread:
    """A thread's registers and predicates; those that were not written are unknown."""

    def __init__(self, code: Code, constants: dict[int, int], index: int) -> None:
        self.code, self.constants = code, constants
        self.special = {"SR_TID.X": index}  # the others are 0
        self.values: dict[str, Number] = {"PT": 1, "UPT": 1, "RZ": 0, "URZ": 0}

    def run(self) -> Counter[int]:
        """Return how often the thread runs the instruction at each address.

        Raises: ValueError at a branch on data, or an operation that is not understood
        """
        counts: Counter[int] = Counter()
        here = 0
        while True:
            name, kind, predicate, operands = self.code[here]
            counts[here] += 1
            after, runs = here + 16, self.predicate(predicate)
            if name in ("BRA", "EXIT") and "DIV" not in kind:
                for also in operands[:-1]:
                    runs = product(runs, self.predicate(also))
                if runs is None and not self.skips_a_call(here, operands[-1]):
                    raise ValueError(f"a branch on data at {here:#x}")
                if runs != 0 and name == "EXIT":
                    return counts
                if runs != 0:
                    after = int(operands[-1], 16)
            elif name not in ("BRA", *WITHOUT_RESULT) and runs != 0:
                self.certain = runs == 1
                try:
                    self.compute(name.removeprefix("U"), kind, operands)
                except (KeyError, ValueError, IndexError) as error:
                    message = f"at {here:#x}: {name} {kind} {operands}"
                    raise ValueError(message) from error
            here = after

    def skips_a_call(self, here: int, target: str) -> bool:
        """Return whether a branch leaves out a call, as that of a division does."""
        between = range(here, int(target or "0", 16), 16)
        return any(self.code[address][0] == "CALL" for address in between)

    def predicate(self, name: str) -> Number:
        value = self.values.get(name.lstrip("!"))
        return known(lambda x: 1 - x, value) if name[0] == "!" else value

    def read(self, operand: str, words: int = 1) -> Number:
        """Return a number of some words, without a sign."""
        bare, number = operand.lstrip("-~"), None
        if re.fullmatch(r"0x[0-9a-f]+|\d+", bare):
            number = int(bare, 0)
        elif found := re.fullmatch(r"c\[0x0\]\[(\w+)\]", bare):
            start = 0 if found[1] == "RZ" else int(found[1], 16)
            number = joined([self.constants.get(start + 4 * i) for i in range(words)])
        elif bare.startswith("SR_"):
            number = self.special.get(bare, 0)
        elif re.fullmatch(r"U?R(\d+|Z)", bare):
            number = joined([self.values.get(r) for r in registers(bare, words)])
        if number is None:
            return None
        number = {"-": -number, "~": ~number}.get(operand[0], number)
        return number & 2 ** (32 * words) - 1

    def write(self, name: str, value: Number, words: int = 1) -> None:
        value = value if self.certain else None
        for i, register in enumerate(registers(name, words)):
            if not register.endswith(("Z", "T")):
                self.values[register] = known(lambda x, i=i: x >> 32 * i & WORD, value)

    def compute(self, name: str, kind: set[str], operands: list[str]) -> None:
        """Run an operation; what it writes is unknown if its meaning is not needed."""
        to, *rest = operands
        written = [to]  # and the predicates that it writes
        while rest and re.fullmatch(r"U?P(\d|T)", rest[0]):
            written.append(rest.pop(0))
            if name == "PLOP3":
                break
        if name == "LOP3" and "P" in to:
            written.insert(0, rest.pop(0))
        words = max(RESULTS.get(k, 1) for k in {*kind, "one"})
        result: Number = None
        if name in ("CALL", "RET", "BRX", "JMP", "R2P", "VOTE"):
            raise ValueError(name)
        if name in ("LOP3", "PLOP3", "ISETP", "P2R", "SEL"):
            self.decide(name, kind, written, rest)
            return
        if name == "CS2R":
            result, words = 0, 2
        elif name in ("MOV", "R2UR", "S2R", "S2UR", "LDC"):
            result = self.read(rest[0], words)
        elif name in ("VIADD", "IADD3", "IMAD", "LEA"):
            result = self.add(name, kind, rest)
            for flag in written[1:]:
                self.write(flag, known(lambda x: x >> 32 & 1, result))
            if "HI" in kind and name == "IMAD":
                result = known(lambda x: x >> 32, result)
        elif name == "SHF":
            low, shift, high = map(self.read, rest[:3])
            if "L" in kind:
                down = 32 if "HI" in kind else 0
                high = high if down else 0
                pair, move = joined([low, high]), operator.lshift
            else:
                down = 0
                pair = joined([low, high]) if "HI" not in kind else high
                pair = known(signed, high) if "S32" in kind else pair
                move = operator.rshift
            result = known(lambda x, s: move(x, s) >> down, pair, shift)
        elif name in ("VIMNMX", "VIADDMNMX"):
            own = int if "U32" in kind else signed
            a, b = self.read(rest[0]), self.read(rest[1])
            if name == "VIADDMNMX":
                a, b = known(lambda x, y: x + y & WORD, a, b), self.read(rest[2])
            pick = min if self.predicate(rest[-1]) else max
            result = known(lambda x, y: pick(own(x), own(y)), a, b)
        self.write(to, result, words)
        if result is None:
            for flag in written[1:]:
                self.write(flag, None)

    def add(self, name: str, kind: set[str], rest: list[str]) -> Number:
        """Return a sum, with its carry, of numbers, products, or a shifted number."""
        carries = [self.predicate(x) for x in rest if "P" in x] if "X" in kind else []
        own = int if "U32" in kind else signed
        wide = 2 if kind & {"WIDE", "HI"} else 1
        if name == "IMAD":
            a, b = map(self.read, rest[:2])
            if wide > 1:
                a, b = known(own, a), known(own, b)
            terms = [product(a, b), self.read(rest[2], wide)]
        elif name == "LEA":
            a, b = map(self.read, rest[:2])
            high: Number = known(lambda x: signed(x) >> 32 & WORD, a)
            if "SX32" not in kind:
                high = self.read(rest[2]) if "HI" in kind else 0
            [shift] = [int(x, 16) for x in rest[2:] if x.startswith("0x")][-1:]
            down = 32 if "HI" in kind else 0
            shifted = known(lambda x: x << shift >> down & WORD, joined([a, high]))
            terms = [shifted, b]
        else:
            terms = [self.read(x) for x in rest[: 2 if name == "VIADD" else 3]]
        return known(lambda *x: sum(x), *terms, *carries)

    def decide(
        self, name: str, kind: set[str], written: list[str], rest: list[str]
    ) -> None:
        """Run an operation on bits and predicates."""
        result: Number
        if name == "SEL":
            chosen = self.predicate(rest[2])
            result = None if chosen is None else self.read(rest[0 if chosen else 1])
        elif name == "P2R":
            mask = int(rest[-1], 16)
            flags = [self.values.get(f"P{i}") for i in range(7) if mask >> i & 1]
            places = [i for i in range(7) if mask >> i & 1]
            bits = (known(operator.lshift, *x) for x in zip(flags, places, strict=True))
            kept = known(lambda x: x & ~mask, self.read(rest[1]))
            result = known(lambda *x: sum(x), kept, *bits)
        elif name == "ISETP":
            own = int if "U32" in kind else signed
            a, b = map(self.read, rest[:2])
            [compares] = [COMPARE[k] for k in kind & COMPARE.keys()]
            result = known(lambda x, y: int(compares(own(x), own(y))), a, b)
            if "EX" in kind and None not in (a, b) and a == b:
                result = self.predicate(rest[3])  # of the lower words
            other = self.predicate(rest[2])
            if "OR" in kind:
                result = known(lambda x: 1 - x, result)
                other = known(lambda x: 1 - x, other)
                result = known(lambda x: 1 - x, product(result, other))
            else:
                result = product(result, other)
            written = written[:1]
        else:
            logic, get = table, self.read if name == "LOP3" else self.predicate
            result = known(logic(rest[3]), *map(get, rest[:3]))
            if name == "PLOP3":
                result = known(lambda x: x & 1, result)
                written = written[:1]
        self.write(written[0], result)
        for flag in written[1:]:
            self.write(flag, known(lambda x: int(x != 0), result))
