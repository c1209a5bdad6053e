"""A PTX emulator for kernels of sm_90a and sm_100f; see README.md."""

from .emulator import HazardError, Hold, Kernel, Report, emulate

__all__ = ["HazardError", "Hold", "Kernel", "Report", "emulate"]
