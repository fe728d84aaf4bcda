"""The ``options`` of ``torch.compile``, parsed once.

==============  ========================================================================================
option          meaning
==============  ========================================================================================
``mesh``        the DeviceMesh of all ranks; the only one that must be given
``memory``      bytes per device that plans may use, as in `autopar.parallelize`
``optimizer``   what will train the parameters, for the memory of its state, as in `autopar.parallelize`
``precision``   dtype to compute in, as in `autopar.parallelize`
``constraints`` what the search must respect, such as ``["tensor=2"]``; nothing about pipelines, and without ``shard``
                nothing about microbatches or ZeRO
``profile``     prices measured before; None: measure; False: estimate
``compile``     compile each distinct layer program with inductor, as in `autopar.parallelize`
``plans``       a folder of plans, one file per graph: what is there is run, what is not is searched for and saved
``shard``       True: the first call that trains shards parameters and optimizer states in place, as the plan says
==============  ========================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.cost import Profile
from autopar.errors import BackendError
from autopar.planning.arguments import read_constraints
from autopar.planning.compiling import check_compiler, read_compile
from autopar.search.settings.constraints import spell_out
from autopar.user_text.suggestions import kind_of, suggest

__all__ = ["Options", "read_options"]

# What a graph of Dynamo's can't have: nobody calls its stages, and storage is the plan's to choose only with `shard`.
_NOT_HERE = re.compile(
    r"\b(pipeline|stages|cuts|schedule|microbatches|gradients|zero|offload(?=\s*=\s*optimizer))\s*=\s*(\w+)"
)
_IF_SHARDED = ("microbatches", "zero")


@dataclass(frozen=True)
class Options:
    """The options of one ``torch.compile``; see the module's table."""

    mesh: DeviceMesh
    memory: float | str | None = None
    optimizer: str | Callable[..., torch.optim.Optimizer] = "adamw"
    precision: str | torch.dtype | None = None
    constraints: tuple[str, ...] = ()
    profile: Profile | Literal[False] | None = None
    compile: bool | None = None
    plans: Path | None = None
    shard: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        """What plans for one graph depend on."""
        return (
            self.memory, str(self.optimizer), str(self.precision), self.constraints, id(self.profile), self.compile,
            self.shard,
        )  # fmt: skip

    @property
    def texts(self) -> tuple[str, ...]:
        """Those that every rank must give alike, as text."""
        optimizer = self.optimizer if isinstance(self.optimizer, str) else getattr(self.optimizer, "__name__", "")
        shared = {
            "memory": self.memory, "optimizer": optimizer, "precision": self.precision, "constraints": self.constraints,
            "profile": type(self.profile).__name__, "compile": self.compile, "shard": self.shard,
        }  # fmt: skip
        return tuple(f"{name}={value}" for name, value in shared.items())


def read_options(options: Mapping[str, Any] | None, mode: str = "") -> Options:
    """The options that the user passed to ``torch.compile``.

    Raises:
        BackendError: an option is unknown, missing or of the wrong kind; it says what to type instead.
        ConstraintError: the constraints are no texts.
        CompilerError: nothing is there that could compile layers as asked.
    """
    given = dict(options or {})
    names = [each.name for each in fields(Options)]
    if mode:
        raise BackendError(f"mode={mode!r} is for backend='inductor': use options={{'compile': True}} here")
    for name in given:
        if name not in names:
            raise BackendError(f"option {name!r} is none of {', '.join(names)}{suggest(str(name), names)}")
    mesh = given.get("mesh")
    if not isinstance(mesh, DeviceMesh):
        said = "no mesh is given" if mesh is None else f"options['mesh'] is {kind_of(mesh)}"
        raise BackendError(
            f"{said}: after dist.init_process_group() write mesh = init_device_mesh('cuda', (dist.get_world_size(),)) "
            "(from torch.distributed.device_mesh; 'cpu' without GPUs) and "
            "torch.compile(model, backend='autopar', options={'mesh': mesh})"
        )
    if not isinstance(given.setdefault("shard", False), bool):
        raise BackendError(f"options['shard'] is {given['shard']!r}: write True or False")
    given["constraints"] = read_constraints(given.get("constraints"))
    for text in given["constraints"]:
        _check_constraint(text, is_sharding=given["shard"])
    given["compile"] = check_compiler(read_compile(given.get("compile")), mesh.device_type)
    if given.get("plans") is not None:
        given["plans"] = Path(given["plans"])
    return Options(**given)


def _check_constraint(text: str, *, is_sharding: bool) -> None:
    for name, value in _NOT_HERE.findall(" ".join(spell_out(text))):
        if (name, value) == ("zero", "0") or (is_sharding and name in _IF_SHARDED):
            continue
        helps = ", say options={'shard': True}" if name in _IF_SHARDED else ""
        raise BackendError(
            f"constraint {text!r} can't be met by backend='autopar', where a graph runs in one piece"
            f"{'' if is_sharding else ' on parameters that stay whole'}: leave it out{helps}, or use "
            f"autopar.parallelize(model, mesh, inputs, constraints=[{text!r}])"
        )
