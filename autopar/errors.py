"""Every error that a user can cause.

A message says what happened, with which values, and what to do.
"""

__all__ = [
    "AutoparError",
    "BackendError",
    "CompilerError",
    "ConstraintError",
    "ExampleInputsError",
    "GradientNormError",
    "HostMemoryError",
    "InfeasibleError",
    "InputShapeError",
    "LengthError",
    "LoaderError",
    "LossError",
    "MaterializationError",
    "MeshError",
    "MissingPackageError",
    "MissingPriceError",
    "ModelError",
    "OptimizerError",
    "OutputError",
    "PipelineError",
    "PlanFormatError",
    "PlanMismatchError",
    "ProfileError",
    "QuestionError",
    "RankError",
    "RuleError",
    "SubmoduleError",
    "TraceError",
    "TrainerError",
    "VerificationError",
]


class AutoparError(Exception):
    """The base of all errors that autopar raises on purpose."""


class ExampleInputsError(AutoparError):
    """The example inputs are missing, or don't match the model's signature."""


class BackendError(AutoparError):
    """``torch.compile(backend="autopar")`` can't run a graph: its options, its tensors, or what other ranks run."""


class TraceError(AutoparError):
    """The model can't be captured as one graph, for instance because control flow depends on data."""


class ModelError(AutoparError):
    """What is handed over as the model is no module of one device: no module at all, or parallel already."""


class OutputError(AutoparError):
    """The model returns something that can't be carried out of a parallel program."""


class OptimizerError(AutoparError):
    """An optimizer was made before `autopar.parallelize`, of parameters that the parallel module does not train."""


class GradientNormError(AutoparError):
    """`torch.nn.utils` was asked for the norm of some gradients only, of a model whose stages know that of all."""


class PipelineError(AutoparError):
    """An action of a pipeline's schedule failed: this rank's stage, or its peer in a transfer, can't go on."""


class InputShapeError(AutoparError):
    """A call's inputs differ from what the plan was made for, or don't divide over the devices."""


class LengthError(AutoparError):
    """Lengths of sequences can't be used: none, not positive, too long for a row, or a file that holds no lengths."""


class LoaderError(AutoparError):
    """A DataLoader can't be made to load the rows of one rank."""


class LossError(AutoparError):
    """A loss function (`loss_fn`) can't be used, or its target is missing."""


class MaterializationError(AutoparError):
    """A model without real parameters (on the meta device) was handed over for running, not only for planning."""


class MeshError(AutoparError):
    """The mesh or cluster can't be used: larger than the world, empty, or of different devices."""


class ConstraintError(AutoparError):
    """A constraint can't be read, matches nothing, or contradicts another."""


class CompilerError(AutoparError):
    """Compiled layers are asked for where there is no compiler."""


class InfeasibleError(AutoparError):
    """No plan fits.  The message names the smallest memory that would do, and what fills it."""


class HostMemoryError(InfeasibleError):
    """What fits on devices offloads more than their hosts have room for."""


class PlanFormatError(AutoparError):
    """The text of a plan can't be read."""


class PlanMismatchError(AutoparError):
    """A plan was made for another model, other dtypes, input shapes or another number of devices."""


class ProfileError(AutoparError):
    """A machine can't be measured as asked, or the file of its profile can't be used."""


class QuestionError(AutoparError):
    """A question to ``python -m autopar.explain`` can't be read: its target, cluster, or what it varies."""


class MissingPackageError(AutoparError, ImportError):
    """An integration needs a package that is not installed.  The message says how to install it."""


class TrainerError(AutoparError):
    """An argument of a trainer of another project has no meaning, or another one, for a parallelized model."""


class RankError(AutoparError):
    """A step can't be finished because of another rank: it does something else, failed, or ended."""


class RuleError(AutoparError):
    """A factor rule is malformed or does not fit the op that it is applied to."""


class SubmoduleError(AutoparError):
    """A submodule of a parallelized model can't run so, or a hook was registered on it."""


class MissingPriceError(AutoparError):
    """An op, dtype or collective has no price on this cluster."""


class VerificationError(AutoparError):
    """A plan does not compute what the single device computes."""
