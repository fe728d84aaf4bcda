"""Plan + module + DeviceMesh -> ParallelModule: local FX programs, DTensor parameters, explicit collectives."""

from autopar.lower.layer_program import LayerProgram, layer_program
from autopar.lower.parallel_module import LoweredProgram, ParallelModule, lower

__all__ = ["LayerProgram", "LoweredProgram", "ParallelModule", "layer_program", "lower"]
