"""Step time of the lowered program against hand-written torch: ``python benchmarks/runtime.py [--ranks 2 4]``.

Both train the same LLaMA-shaped model with the same strategy over gloo, in the same processes, one step of each in
turn, so that whatever else the machine does hits both.  The figure is the median over steps of the ratio autopar /
hand-written, of the slowest rank's seconds; below 1 autopar is faster.  By hand: `parallelize_module` for tensor
parallelism, selective activation checkpointing (products and attention are kept, as torchtitan's policy does),
``compile()`` and `fully_shard` of each decoder layer, in torchtitan's order, and the loss on gathered logits, as in
torch's tutorials; autopar keeps the vocabulary sharded where it shards it.  Tensor parallelism by hand is not compiled:
with torch 2.13 and layers of transformers 5.23 its backward raises "'Tensor' object has no attribute '_local_tensor'".
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """One strategy, for both.

    Args:
        data: ranks that split the batch.
        tensor: ranks that split each layer.
        zero: ZeRO level over the data ranks.
        recompute: ``"none"``, or ``"selective"``: everything but products and attention is computed again.
        compiled: whether each layer is compiled.
    """

    data: int
    tensor: int
    zero: int
    recompute: str = "none"
    compiled: bool = False

    @property
    def name(self) -> str:
        """What asks for it, as text."""
        return " ".join([*self.degrees, f"zero={self.zero}", *(["compile"] if self.compiled else []),
                         *([f"recompute={self.recompute}"] if self.recompute != "none" else [])])  # fmt: skip

    @property
    def degrees(self) -> list[str]:
        """Constraints on axes."""
        degrees = {"data": self.data, "tensor": self.tensor}
        return [f"{name}={degree}" for name, degree in degrees.items() if degree > 1]

    @property
    def constraints(self) -> tuple[str, ...]:
        """What asks autopar for it."""
        return (*self.degrees, f"zero={self.zero}", f"recompute={self.recompute}", "microbatches=1")


CASES = {
    case.name: case
    for case in (
        Case(2, 1, 3), Case(2, 1, 2), Case(1, 2, 0), Case(2, 1, 3, compiled=True), Case(2, 1, 3, "selective"),
        Case(2, 1, 3, "selective", compiled=True), Case(4, 1, 3), Case(2, 2, 3),
    )
}  # fmt: skip


def make_model() -> tuple[nn.Module, dict[str, Tensor]]:
    """A LLaMA-shaped model of 6 M parameters in float32, and one global batch of 4096 tokens."""
    import transformers  # noqa: PLC0415  (the launching process does not need it)

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=256, use_cache=False, pad_token_id=0,
    )  # fmt: skip
    ids = torch.randint(0, 512, (16, 256))
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def _keep_products(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> Any:
    """The usual policy of selective activation checkpointing: keep what is dear to compute."""
    from torch.utils.checkpoint import CheckpointPolicy  # noqa: PLC0415

    aten = torch.ops.aten
    dear = {
        aten.mm.default, aten.addmm.default, aten.bmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
    }  # fmt: skip
    return CheckpointPolicy.MUST_SAVE if op in dear else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpointed(layer: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper  # noqa: PLC0415
    from torch.utils.checkpoint import create_selective_checkpoint_contexts  # noqa: PLC0415

    return checkpoint_wrapper(layer, context_fn=lambda: create_selective_checkpoint_contexts(_keep_products))


def parallelize_by_hand(model: Any, case: Case) -> nn.Module:
    """The recipe of torch's tutorials and of torchtitan for this model."""
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415
    from torch.distributed.tensor.parallel import (  # noqa: PLC0415
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (case.data, case.tensor), mesh_dim_names=("data", "tensor"))
    if case.tensor > 1:
        parallelize_module(model, mesh["tensor"], {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        })  # fmt: skip
        for layer in model.model.layers:
            parallelize_module(layer, mesh["tensor"], {
                "input_layernorm": SequenceParallel(),
                "self_attn": PrepareModuleInput(
                    input_kwarg_layouts={"hidden_states": Shard(1)},
                    desired_input_kwarg_layouts={"hidden_states": Replicate()},
                ),
                "self_attn.q_proj": ColwiseParallel(), "self_attn.k_proj": ColwiseParallel(),
                "self_attn.v_proj": ColwiseParallel(), "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
                "post_attention_layernorm": SequenceParallel(),
                "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
                "mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(),
                "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
            })  # fmt: skip
    for index, layer in enumerate(model.model.layers):
        if case.recompute == "selective":
            model.model.layers[index] = _checkpointed(layer)
        if case.compiled:
            model.model.layers[index].compile()
    if case.data > 1:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["data"], reshard_after_forward=case.zero == 3)
        fully_shard(model, mesh=mesh["data"], reshard_after_forward=case.zero == 3)
    return model


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Tensor]) -> float:
    """Seconds of one whole step on the slowest rank."""
    dist.barrier()
    started = time.perf_counter()
    model(**inputs).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    seconds = torch.tensor(time.perf_counter() - started)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def run_case(name: str, steps: int) -> None:
    """Compare one case; every rank runs this."""
    import autopar  # noqa: PLC0415

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    case = CASES[name]
    model, inputs = make_model()
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    ours = autopar.parallelize(model, mesh, inputs, constraints=case.constraints, compile=case.compiled)
    theirs = parallelize_by_hand(copy.deepcopy(model), case)
    rank = dist.get_rank() // case.tensor
    mine = {key: value.chunk(case.data)[rank] for key, value in inputs.items()}
    # By hand the residual stream is a slice of the sequence, so the model can't infer the positions from its length.
    mine["position_ids"] = torch.arange(inputs["input_ids"].shape[1])[None]
    runs: tuple[tuple[nn.Module, dict[str, Tensor]], ...] = ((ours, inputs), (theirs, mine))
    optimizers = [torch.optim.AdamW(m.parameters(), foreach=False) for m, _ in runs]
    seconds: list[list[float]] = [[], []]
    for step in range(steps + 3):
        for which, (m, batch) in enumerate(runs):
            elapsed = train_step(m, optimizers[which], batch)
            if step >= 3:
                seconds[which].append(elapsed)
    if dist.get_rank() == 0:
        ratios = sorted(a / b for a, b in zip(*seconds, strict=True))
        quartiles = statistics.quantiles(ratios, n=4)
        sys.stdout.write(
            f"{name:36s} ratio median {statistics.median(ratios):.3f} "
            f"(quartiles {quartiles[0]:.3f} to {quartiles[2]:.3f}, {steps} steps; "
            f"medians {statistics.median(seconds[0]):.4f} s and {statistics.median(seconds[1]):.4f} s)\n"
        )
        for strategy in dict.fromkeys((s.mesh, s.labels, s.zero) for s in ours.plan.strategies):
            sys.stdout.write(f"    {strategy}\n")
    dist.destroy_process_group()


def main() -> None:
    """Launch every case under torchrun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--case", default="", help="run only this case")
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_case(options.case, options.steps)
        return
    sys.stdout.write(
        f"# {' '.join(sys.argv)}: torch {torch.__version__}, {os.cpu_count()} cores, 1 thread a rank, gloo\n"
    )
    for name, case in CASES.items():
        ranks = case.data * case.tensor
        if ranks in options.ranks and options.case in ("", name):
            sys.stdout.flush()
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            subprocess.run([*launch, __file__, "--case", name, "--steps", str(options.steps)], check=True)


if __name__ == "__main__":
    main()
