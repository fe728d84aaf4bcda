"""Plan + module + DeviceMesh -> ParallelModule: FX programs on local tensors, DTensor parameters."""

from autopar.lower.program.layer_program import LayerProgram, layer_program
from autopar.lower.program.program_text import LoweredProgram
from autopar.lower.run.lowering import Executable
from autopar.lower.run.parallel_module import ParallelModule, lower

__all__ = ["Executable", "LayerProgram", "LoweredProgram", "ParallelModule", "layer_program", "lower"]
