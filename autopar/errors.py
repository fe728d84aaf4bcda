"""The errors that users can cause.

Their messages say what happened, with which values, and what to do.
"""

__all__ = [
    "AutoparError",
    "BackendError",
    "CompilerError",
    "ConstraintError",
    "DeadlineError",
    "ExampleInputsError",
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
    """The base class of all errors that autopar raises on purpose."""


class ExampleInputsError(AutoparError):
    """The example inputs are missing, or don't match the model's signature."""


class BackendError(AutoparError):
    """``torch.compile(backend="autopar")`` can't run a graph, because of its options, its tensors, or other ranks."""


class TraceError(AutoparError):
    """The model can't be captured as one graph, for instance because control flow depends on data."""


class ModelError(AutoparError):
    """The model isn't a single-device module: it is no module at all, or already parallel."""


class OutputError(AutoparError):
    """The model returns something that a parallel program can't return."""


class OptimizerError(AutoparError):
    """An optimizer was made before `autopar.parallelize`, with parameters that the parallel module doesn't train."""


class PipelineError(AutoparError):
    """An action of a pipeline schedule failed: this rank's stage, or its peer in a transfer, can't continue."""


class InputShapeError(AutoparError):
    """The inputs of a call differ from those that the plan was made for, or don't divide over the devices."""


class LengthError(AutoparError):
    """Lengths of sequences can't be used: there are none, one isn't positive or is too long for a row, or a file has
    no lengths.
    """


class LoaderError(AutoparError):
    """A DataLoader can't be changed to load only the rows of one rank."""


class LossError(AutoparError):
    """A loss function (`loss_fn`) can't be used, or its target is missing."""


class MaterializationError(AutoparError):
    """A model without real parameters (on the meta device) was passed to a function that runs it."""


class MeshError(AutoparError):
    """The mesh or cluster can't be used: it is larger than the world, empty, or has different devices."""


class ConstraintError(AutoparError):
    """A constraint can't be read, matches nothing, or contradicts another one."""


class CompilerError(AutoparError):
    """Compiled layers were requested, but there is no compiler."""


class InfeasibleError(AutoparError, RuntimeError):
    """No plan fits in memory.  The message names the smallest memory that would suffice, and what fills it.

    It is a RuntimeError whose text has "out of memory.", as an allocator's has: who retries with a smaller batch after
    that (accelerate's ``find_executable_batch_size``) does so after this, too.
    """


class HostMemoryError(InfeasibleError):
    """Plans that fit on the devices offload more than fits in the memory of their hosts."""


class DeadlineError(AutoparError):
    """A search was stopped at its deadline (`autopar.search.SearchRequest.deadline`)."""


class PlanFormatError(AutoparError):
    """The text of a plan can't be read."""


class PlanMismatchError(AutoparError):
    """A plan was made for another model, other dtypes or input shapes, or another number of devices."""


class ProfileError(AutoparError):
    """A machine can't be measured as requested, or the file of its profile can't be used."""


class QuestionError(AutoparError):
    """Arguments of ``python -m autopar.explain`` are invalid: the target, the cluster, or the choices to vary."""


class MissingPackageError(AutoparError, ImportError):
    """An integration needs a package that is not installed.  The message says how to install it."""


class TrainerError(AutoparError):
    """An argument of another project's trainer has no meaning, or a different one, for a parallelized model."""


class RankError(AutoparError):
    """A step can't be finished because another rank runs something else, failed, or ended."""


class RuleError(AutoparError):
    """A factor rule is malformed, or doesn't fit the op to which it is applied."""


class SubmoduleError(AutoparError):
    """A submodule of a parallelized model can't run in this way, or a hook was registered on it."""


class MissingPriceError(AutoparError):
    """An op, dtype or collective has no price on this cluster."""


class VerificationError(AutoparError):
    """A plan doesn't compute what a single device computes."""
