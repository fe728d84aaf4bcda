"""Which models of packages that many people train with do so as on one device: small, with random weights.

    pip install --no-deps x-transformers open_clip_torch segmentation_models_pytorch torchvision ...
    python benchmarks/packages.py [--only NAME ...] [--plans free tensor=2 ...]

Each model of `MODELS` whose package is there is planned for two H100s, and the plan is verified as in
``benchmarks/diffusers_and_timm.py``.  What draws random numbers, or asks for values in Python, is counted as refused.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import argparse
import importlib
import platform
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diffusers_and_timm import outcome

ROWS, TOKENS, WORDS, WIDTH = 4, 16, 64, 32
SIZES = {"dim": WIDTH, "depth": 2, "heads": 2, "attn_dim_head": 16}
VISION = {"image_size": 32, "layers": 2, "width": WIDTH, "patch_size": 8, "head_width": 16}
TEXT = {"context_length": 12, "vocab_size": WORDS, "width": WIDTH, "heads": 2, "layers": 2}
PACKAGES = (
    "torch", "x-transformers", "open_clip_torch", "denoising-diffusion-pytorch", "segmentation_models_pytorch",
    "lightly", "torch_geometric", "fair-esm", "litgpt", "vector-quantize-pytorch", "zuko", "neuraloperator",
)  # fmt: skip


def made(module: str, name: str, *args: Any, **options: Any) -> Any:
    """An object of a class of a package."""
    return getattr(importlib.import_module(module), name)(*args, **options)


class Called(nn.Module):
    """A loss of what a network returns."""

    def __init__(self, loss: Callable[..., Tensor], /, **parts: nn.Module) -> None:
        """``loss(parts, **inputs)``."""
        super().__init__()
        self.parts, self.loss = nn.ModuleDict(parts), loss

    def forward(self, **inputs: Any) -> Tensor:
        """[] of the inputs."""
        return self.loss(self.parts, **inputs)


def squared(parts: Any, **inputs: Any) -> Tensor:
    """The mean squares of all that a network returns, and a part that is not even."""

    def tensors(x: Any) -> Iterator[Tensor]:
        if isinstance(x, Tensor):
            yield torch.view_as_real(x) if x.is_complex() else x
        elif isinstance(x, list | tuple):
            for part in cast("Sequence[Any]", x):
                yield from tensors(part)

    found = [x for x in tensors(parts["net"](**inputs)) if x.is_floating_point()]
    return torch.stack([x.square().mean() + x.flatten()[::2].sigmoid().mean() for x in found]).sum()


def next_token(parts: Any, x: Tensor) -> Tensor:
    """The cross entropy of a language model's next tokens; `x` [rows, tokens]."""
    return functional.cross_entropy(parts["net"](x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def of_logits(parts: Any, x: Tensor) -> Tensor:
    """The mean logarithm of the sums of exponentials of logits for tokens `x` [rows, tokens]."""
    return parts["net"](x)["logits"].logsumexp(-1).mean()


def pairs(parts: Any, image: Tensor, text: Tensor) -> Tensor:
    """The contrastive loss of images and texts."""
    return parts["loss"](*parts["net"](image, text))


def labelled(parts: Any, x: Tensor, y: Tensor) -> Tensor:
    """The loss of a network's result and of its labels."""
    return parts["loss"](parts["net"](x), y)


def two_views(parts: Any, x: Tensor, y: Tensor) -> Tensor:
    """The loss of two views of the same samples."""
    return parts["loss"](parts["net"](x), parts["net"](y))


def graph(parts: Any, x: Tensor, edge_index: Tensor, y: Tensor) -> Tensor:
    """The cross entropy of nodes' classes."""
    return functional.cross_entropy(parts["last"](parts["first"](x, edge_index).relu(), edge_index), y)


def quantized(parts: Any, x: Tensor) -> Tensor:
    """The error of an autoencoder with a codebook."""
    return functional.mse_loss(parts["last"](parts["codes"](parts["first"](x))[0]), x)


def likelihood(parts: Any, x: Tensor, c: Tensor) -> Tensor:
    """The mean negative logarithm of a flow's density."""
    return -parts["net"](c).log_prob(x).mean()


def words(tokens: int = TOKENS) -> Tensor:
    """Random ids [rows, tokens]."""
    return torch.randint(1, WORDS, (ROWS, tokens))


def x_transformer(**options: Any) -> nn.Module:
    """A decoder of x-transformers with options, some of them its wrapper's."""
    outer = {key: options.pop(key) for key in ("num_memory_tokens", "tie_embedding", "l2norm_embed") if key in options}
    layers = made("x_transformers", "Decoder", **{**SIZES, **options})
    net = made("x_transformers", "TransformerWrapper", num_tokens=WORDS, max_seq_len=32, attn_layers=layers, **outer)
    return made("x_transformers", "AutoregressiveWrapper", net)


def clip(**options: Any) -> nn.Module:
    """A small CLIP with its loss."""
    net = made("open_clip", "CLIP", embed_dim=WIDTH, vision_cfg=VISION, text_cfg=TEXT, **options)
    return Called(pairs, net=net, loss=made("open_clip.loss", "ClipLoss"))


def diffusion(**options: Any) -> nn.Module:
    """A U-Net of denoising-diffusion-pytorch."""
    net = made("denoising_diffusion_pytorch", "Unet", 16, dim_mults=(1, 2), attn_dim_head=8, attn_heads=2, **options)
    return Called(squared, net=net)


def segmenter(name: str, loss: str, **options: Any) -> nn.Module:
    """A network of segmentation-models-pytorch with one of its losses."""
    package = "segmentation_models_pytorch"
    net = made(package, name, "resnet18", encoder_weights=None, classes=1, **options)
    return Called(labelled, net=net, loss=made(f"{package}.losses", loss, mode="binary"))


def of_two_views(loss: str) -> nn.Module:
    """A linear layer under a loss of lightly."""
    return Called(two_views, net=nn.Linear(8, 16), loss=made("lightly.loss", loss))


def of_graphs(name: str) -> nn.Module:
    """Two layers of torch_geometric."""
    layers = (made("torch_geometric.nn", name, width, out) for width, out in ((8, 16), (16, 4)))
    return Called(graph, **dict(zip(("first", "last"), layers, strict=True)))


def esm2() -> nn.Module:
    """A small ESM-2."""
    alphabet = getattr(importlib.import_module("esm"), "Alphabet").from_architecture("ESM-1b")  # noqa: B009
    options = {"num_layers": 2, "embed_dim": WIDTH, "attention_heads": 2, "alphabet": alphabet}
    return Called(of_logits, net=made("esm", "ESM2", **options))


def llama() -> nn.Module:
    """A small LLaMA of litgpt."""
    config = made(
        "litgpt", "Config", block_size=32, padded_vocab_size=WORDS, n_layer=2, n_head=4, n_embd=WIDTH, bias=False,
        n_query_groups=2, rotary_percentage=1.0, parallel_residual=False, norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP", intermediate_size=64,
    )  # fmt: skip
    return Called(next_token, net=made("litgpt", "GPT", config))


def codebook() -> nn.Module:
    """An autoencoder with a codebook of vector-quantize-pytorch."""
    codes = made("vector_quantize_pytorch", "FSQ", levels=[8, 5, 5], dim=16)
    return Called(quantized, first=nn.Linear(8, 16), last=nn.Linear(16, 8), codes=codes)


def pictures() -> dict[str, Tensor]:
    """Images and masks."""
    return {"x": torch.randn(ROWS, 3, 64, 64), "y": torch.randint(2, (ROWS, 1, 64, 64)).float()}


def nodes() -> dict[str, Tensor]:
    """A graph of 16 nodes and 40 edges."""
    return {"x": torch.randn(16, 8), "edge_index": torch.randint(16, (2, 40)), "y": torch.randint(4, (16,))}


def captioned() -> dict[str, Tensor]:
    """Images and texts."""
    return {"image": torch.randn(ROWS, 3, 32, 32), "text": words(12)}


def noisy() -> dict[str, Tensor]:
    """Images and times."""
    return {"x": torch.randn(ROWS, 3, 16, 16), "time": torch.randint(1000, (ROWS,))}


def views() -> dict[str, Tensor]:
    """Two views of 8 samples."""
    return {"x": torch.randn(8, 8), "y": torch.randn(8, 8)}


Made = tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]
MODELS: dict[str, Made] = {
    "x-transformers: rotary, grouped heads, memory tokens, GLU": (
        lambda: x_transformer(rotary_pos_emb=True, heads=4, attn_kv_heads=2, num_memory_tokens=4, ff_glu=True),
        lambda: {"x": words(17)},
    ),
    "x-transformers: ALiBi, macaron, QK norm, gates": (
        lambda: x_transformer(alibi_pos_bias=True, macaron=True, attn_qk_norm=True, gate_residual=True, shift_tokens=1),
        lambda: {"x": words(17)},
    ),
    "x-transformers: T5's bias, sandwich norms, talking heads": (
        lambda: x_transformer(rel_pos_bias=True, sandwich_norm=True, attn_pre_talking_heads=True, l2norm_embed=True),
        lambda: {"x": words(17)},
    ),
    "open_clip: CLIP": (clip, captioned),
    "denoising-diffusion: Unet": (diffusion, noisy),
    "segmentation-models: Unet, Dice": (lambda: segmenter("Unet", "DiceLoss"), pictures),
    "segmentation-models: FPN, focal": (lambda: segmenter("FPN", "FocalLoss", decoder_dropout=0.0), pictures),
    "lightly: NT-Xent": (lambda: of_two_views("NTXentLoss"), views),
    "lightly: VICReg": (lambda: of_two_views("VICRegLoss"), views),
    "lightly: DCL": (lambda: of_two_views("DCLLoss"), views),
    "torch_geometric: SAGE": (lambda: of_graphs("SAGEConv"), nodes),
    "torch_geometric: GAT": (lambda: of_graphs("GATConv"), nodes),
    "fair-esm: ESM-2": (esm2, lambda: {"x": torch.randint(4, 24, (ROWS, 12))}),
    "litgpt: LLaMA": (llama, lambda: {"x": words()}),
    "vector-quantize: FSQ": (codebook, lambda: {"x": torch.randn(ROWS, 6, 8)}),
    "zuko: NSF": (
        lambda: Called(likelihood, net=made("zuko.flows", "NSF", 4, 2, transforms=2, hidden_features=(16,))),
        lambda: {"x": torch.randn(ROWS, 4), "c": torch.randn(ROWS, 2)},
    ),
    "neuraloperator: FNO": (
        lambda: Called(squared, net=made("neuralop.models", "FNO", (4, 4), 1, 1, 8, n_layers=2)),
        lambda: {"x": torch.randn(ROWS, 1, 16, 16)},
    ),
}


def main() -> None:
    """Print a line for each model and plan, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="parts of names")
    parser.add_argument("--plans", nargs="*", default=["data=2", "tensor=2"])
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    versions: dict[str, str] = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    print(f"# {' '.join(sys.argv)}: {versions}, {platform.machine()}")
    counts: Counter[str] = Counter()
    for name, (make, inputs) in MODELS.items():
        if chosen.only and not any(part in name for part in chosen.only):
            continue
        torch.manual_seed(0)
        try:
            model = make().train()
        except ModuleNotFoundError as error:
            print(f"{name}: {error}")
            continue
        for plan in chosen.plans:
            began = time.perf_counter()
            text = outcome(model, inputs(), [] if plan == "free" else plan.split())
            counts[text.split(":")[0]] += 1
            print(f"{name}, {plan}: {text[:300]} ({time.perf_counter() - began:.0f} s)", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
