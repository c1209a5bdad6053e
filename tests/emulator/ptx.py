"""PTX text to statements: kernels, variables, scopes, labels. No instruction is understood here."""

import re
from dataclasses import dataclass, field

TYPE_BYTES = {
    **{f"{kind}{bits}": bits // 8 for kind in "bus" for bits in (8, 16, 32, 64)},
    "b128": 16,
    "f16": 2,
    "f32": 4,
    "f64": 8,
    "pred": 1,
}


class PtxError(Exception):
    """The text is not PTX that this emulator can run; the message names what and where."""


@dataclass(frozen=True)
class Variable:
    """A variable in memory: its space, size and alignment in bytes, and initial content."""

    name: str
    space: str
    size: int
    align: int
    content: bytes | None = None


@dataclass(eq=False)
class Scope:
    """Names of registers and labels are local to a `{ }` block; variables too."""

    parent: "Scope | None" = None
    registers: dict[str, str] = field(default_factory=dict)
    families: dict[str, tuple[str, int]] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)

    def find(self, table: str, name: str):
        scope = self
        while scope:
            if name in getattr(scope, table):
                return scope, getattr(scope, table)[name]
            scope = scope.parent
        return None

    def register(self, name: str) -> tuple["Scope", str] | None:
        """The scope that declares a register, and its type; None where it is no register."""
        if found := self.find("registers", name):
            return found
        # %r12 of the family %r; the family's own name may end in digits.
        for length in range(len(name) - 1, 0, -1):
            if not name[length:].isdecimal():
                return None
            if found := self.find("families", name[:length]):
                scope, (kind, count) = found
                if int(name[length:]) < count:
                    return scope, kind
        return None


@dataclass(frozen=True)
class Statement:
    line: int
    guard: str | None
    opcode: str
    operands: tuple[str, ...]
    scope: Scope

    @property
    def text(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        return f"line {self.line}: {guard}{self.opcode} {', '.join(self.operands)}"


@dataclass
class Kernel:
    name: str
    params: list[Variable]
    variables: list[Variable] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    reqntid: tuple[int, ...] | None = None


@dataclass
class Module:
    kernels: dict[str, Kernel]
    variables: list[Variable]
    target: str


def parse(text: str) -> Module:
    """The kernels and the module-wide variables of PTX text."""
    return _Parser(text).module()


def split_operands(text: str) -> tuple[str, ...]:
    """Operands at the top level: `%r1, {a, b}, [c, {d}]` has three."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char in "{[(":
            depth += 1
        elif char in "}])":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return tuple(parts) if parts != [""] else ()


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_DIRECTIVE = re.compile(r"\.(version|target|address_size|file)\b([^\n]*)")
_SECTION = re.compile(r"\.section\b[^{]*\{[^}]*\}")
_ENTRY = re.compile(
    r"(?:\.(?:visible|weak)\s+)?\.entry\s+([\w$]+)\s*(?:\((.*?)\))?([^{(]*)", re.DOTALL
)
_VARIABLE = re.compile(
    r"(?:\.(?:visible|extern|weak|common)\s+)*\.(shared|global|const|local|param)\s+"
    r"(?:\.align\s+(\d+)\s+)?(?:\.attribute\([^)]*\)\s+)?\.(\w+)\s+"
    r"(?:\.ptr(?:\s+\.\w+)?(?:\s+\.align\s+\d+)?\s+)?([\w$%]+)\s*"
    r"((?:\[\d*\])*)\s*(?:=\s*(.*))?$",
    re.DOTALL,
)
_LABEL = re.compile(r"([A-Za-z_$][\w$]*)\s*:(?!:)")
_INSTRUCTION = re.compile(r"(?:@(!?[\w%$]+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.DOTALL)


class _Parser:
    def __init__(self, text: str):
        # Comments become blanks, so that lines keep their numbers.
        self.text = _COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
        self.at = 0
        self.counted, self.lines = 0, 1

    @property
    def line(self) -> int:
        self.lines += self.text.count("\n", self.counted, self.at)
        self.counted = self.at
        return self.lines

    def match(self, pattern: re.Pattern) -> re.Match | None:
        match = pattern.match(self.text, self.at)
        if match:
            self.at = match.end()
        return match

    def skip_blanks(self) -> str:
        """The next character that is no blank, or "" at the end."""
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        return self.text[self.at : self.at + 1]

    def statement_text(self) -> str:
        """The text up to the next semicolon."""
        end = self.text.find(";", self.at)
        if end < 0:
            raise PtxError(f"line {self.line}: no end of {self.text[self.at : self.at + 60]!r}")
        text = self.text[self.at : end].strip()
        self.at = end + 1
        return text

    def module(self) -> Module:
        module = Module({}, [], "")
        while self.skip_blanks():
            if match := self.match(_DIRECTIVE):
                if match[1] == "target":
                    module.target = match[2].strip()
            elif match := self.match(_ENTRY):
                kernel = self.kernel(match)
                module.kernels[kernel.name] = kernel
            elif not self.match(_SECTION):
                module.variables.append(self.variable(self.statement_text()))
        return module

    def variable(self, text: str) -> Variable:
        match = _VARIABLE.match(text.strip())
        if not match:
            raise PtxError(f"line {self.line}: cannot read {text.strip()[:80]!r}")
        space, align, kind, name, dims, init = match.groups()
        width = TYPE_BYTES[kind]
        size = width
        for dim in re.findall(r"\[(\d*)\]", dims):
            size *= int(dim or 0)
        content = None
        if init:
            values = [int(v, 0) for v in re.findall(r"-?\w+", init)]
            content = b"".join((v % (1 << 8 * width)).to_bytes(width, "little") for v in values)
        return Variable(name, space, size, int(align or width), content)

    def kernel(self, head: re.Match) -> Kernel:
        name, params, directives = head.groups()
        kernel = Kernel(name, [self.variable(p) for p in split_operands(params or "")])
        if match := re.search(r"\.reqntid\s+([\d, ]+)", directives):
            kernel.reqntid = tuple(int(v) for v in match[1].split(","))
        scope = None
        while True:
            char = self.skip_blanks()
            if char == "{":
                scope = Scope(scope)
                self.at += 1
            elif char == "}":
                scope = scope.parent
                self.at += 1
                if scope is None:
                    return kernel
            elif match := self.match(_LABEL):
                scope.labels[match[1]] = len(kernel.statements)
            else:
                line = self.line
                self.statement(kernel, scope, line, self.statement_text())

    def statement(self, kernel: Kernel, scope: Scope, line: int, text: str) -> None:
        if text.startswith(".reg"):
            _, kind, names = text.split(None, 2)
            for name in names.split(","):
                if match := re.fullmatch(r"\s*([\w%$]+)<(\d+)>\s*", name):
                    scope.families[match[1]] = (kind[1:], int(match[2]))
                else:
                    scope.registers[name.strip()] = kind[1:]
        elif _VARIABLE.match(text):
            kernel.variables.append(self.variable(text))
        elif text.startswith((".pragma", ".loc")) or not text:
            pass
        elif match := _INSTRUCTION.match(text):
            guard, opcode, rest = match.groups()
            operands = split_operands(" ".join(rest.split()))
            kernel.statements.append(Statement(line, guard, opcode, operands, scope))
        else:
            raise PtxError(f"line {line}: cannot read {text[:80]!r}")
