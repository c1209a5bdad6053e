"""A kernel's statements as a program of the machine. What is not known is an error."""

from . import lower_async, lower_sync  # noqa: F401  each registers its instructions
from .encode import Encoder, Program
from .instructions import Lowering
from .ptx import Module


def lower(module: Module, name: str) -> Program:
    """The program of one kernel of a module."""
    kernel = module.kernels[name]
    lowering = Lowering(Encoder(module, kernel))
    for statement in kernel.statements:
        before = len(lowering.encoder.code)
        lowering.statement(statement)
        assert len(lowering.encoder.code) == before + 1, statement.text
    return lowering.encoder.program()
