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
        match = re.fullmatch(r"(.*?)(\d+)", name)
        while match:
            if found := self.find("families", match[1]):
                scope, (kind, count) = found
                if int(match[2]) < count:
                    return scope, kind
            # %r1 of the family %r, or of a family whose own name ends in digits.
            longer = re.fullmatch(r"(.*?\d)(\d+)", name)
            match = (
                longer
                if longer and longer[1] != match[1] and len(longer[1]) > len(match[1])
                else None
            )
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
_VARIABLE = re.compile(
    r"(?:\.(?:visible|extern|weak|common)\s+)*\.(shared|global|const|local|param)\s+"
    r"(?:\.align\s+(\d+)\s+)?(?:\.attribute\([^)]*\)\s+)?\.(\w+)\s+([\w$%]+)\s*"
    r"((?:\[\d*\])*)\s*(?:=\s*(.*))?$",
    re.DOTALL,
)
_LABEL = re.compile(r"\s*([A-Za-z_$][\w$]*)\s*:(?!:)")
_INSTRUCTION = re.compile(r"(?:@(!?[\w%$]+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.DOTALL)


class _Parser:
    def __init__(self, text: str):
        blank = lambda match: re.sub(r"[^\n]", " ", match[0])
        self.text = _COMMENT.sub(blank, text)
        self.at = 0
        self.line = 1

    def module(self) -> Module:
        module = Module({}, [], "")
        while token := self.until(";{\n", keep="{"):
            head = token.strip()
            if not head:
                continue
            if ".entry" in head.split("{")[0] or head.startswith(".entry"):
                kernel = self.kernel(head)
                module.kernels[kernel.name] = kernel
            elif match := re.match(r"\.(version|target|address_size|file|section)\b\s*(.*)", head):
                if match[1] == "target":
                    module.target = match[2].strip()
                elif match[1] == "section":
                    self.skip_block()
            elif _VARIABLE.match(head):
                module.variables.append(self.variable(head, more=True))
            elif re.match(r"\.(visible|extern|weak)\b", head) and ".func" not in head:
                # A declaration that goes on on the next line.
                self.prepend(head)
            else:
                raise PtxError(f"line {self.line}: cannot read {head[:80]!r}")
        return module

    def prepend(self, head: str) -> None:
        rest = self.until(";{\n", keep="{")
        self.at -= len(rest)
        self.text = self.text[: self.at] + head + " " + self.text[self.at :]

    def until(self, stops: str, keep: str = "") -> str:
        """The text up to one of `stops`, which is passed over unless it is in `keep`."""
        start = self.at
        while self.at < len(self.text) and self.text[self.at] not in stops:
            self.at += 1
        token = self.text[start : self.at]
        if self.at < len(self.text) and self.text[self.at] not in keep:
            token += self.text[self.at]
            self.at += 1
        self.line += token.count("\n")
        return token.rstrip(stops.replace(keep, "")) or ("" if self.at >= len(self.text) else " ")

    def skip_block(self) -> None:
        while self.at < len(self.text) and self.text[self.at] != "}":
            self.line += self.text[self.at] == "\n"
            self.at += 1
        self.at += 1

    def variable(self, head: str, more: bool = False) -> Variable:
        match = _VARIABLE.match(head.strip())
        if not match:
            raise PtxError(f"line {self.line}: cannot read the variable {head.strip()[:80]!r}")
        space, align, kind, name, dims, init = match.groups()
        if more and init is not None and init.strip() == "":
            raise PtxError(f"line {self.line}: variable {name} has no initial value")
        size = TYPE_BYTES[kind]
        for dim in re.findall(r"\[(\d*)\]", dims):
            size *= int(dim or 0)
        content = None
        if init:
            values = [int(v, 0) for v in re.findall(r"-?\w+", init)]
            width = TYPE_BYTES[kind]
            content = b"".join((v % (1 << 8 * width)).to_bytes(width, "little") for v in values)
        return Variable(name, space, size, int(align or TYPE_BYTES[kind]), content)

    def kernel(self, head: str) -> Kernel:
        while "{" not in head and (self.at < len(self.text) and self.text[self.at] != "{"):
            head += " " + self.until("{", keep="{")
        name = re.search(r"\.entry\s+([\w$]+)", head)[1]
        params = []
        if match := re.search(r"\((.*)\)", head.replace("\n", " "), re.DOTALL):
            params = [self.variable(p) for p in split_operands(match[1])]
        kernel = Kernel(name, params)
        if match := re.search(r"\.reqntid\s+([\d, ]+)", head):
            kernel.reqntid = tuple(int(v) for v in match[1].split(","))
        self.body(kernel)
        return kernel

    def body(self, kernel: Kernel) -> None:
        scope = None
        while True:
            while self.at < len(self.text) and self.text[self.at].isspace():
                self.line += self.text[self.at] == "\n"
                self.at += 1
            char = self.text[self.at]
            if char == "{":
                scope = Scope(scope)
                self.at += 1
            elif char == "}":
                scope = scope.parent
                self.at += 1
                if scope is None:
                    return
            elif match := _LABEL.match(self.text, self.at):
                scope.labels[match[1]] = len(kernel.statements)
                self.at = match.end()
            else:
                line = self.line
                end = self.text.index(";", self.at)
                statement = self.text[self.at : end]
                self.line += statement.count("\n")
                self.at = end + 1
                self.statement(kernel, scope, line, statement.strip())

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
