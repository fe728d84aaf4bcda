"""Plan + module + DeviceMesh -> ParallelModule: FX programs on local tensors, DTensor parameters."""

from autopar.lower.layer_program import LayerProgram, layer_program
from autopar.lower.parallel_module import ParallelModule, lower
from autopar.lower.program_text import LoweredProgram

__all__ = ["LayerProgram", "LoweredProgram", "ParallelModule", "layer_program", "lower"]
