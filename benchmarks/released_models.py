"""Plans for models of the sizes that were released: ``python benchmarks/released_models.py [--case NAME ...]``.

Models are on the meta device, in bfloat16, with configurations as their authors published them (config.json on
huggingface.co, or the defaults of transformers and diffusers), for nodes of eight H100s.  Batches are made up.  Each
case runs in a process of its own, for up to --seconds, and prints a line: parameters, devices, CPU seconds and memory
of planning, the predicted step, peak memory, the gap to the bound on all plans, and the plan.  It shows whether a plan
is found, and how long that takes; no step was run.
"""

from __future__ import annotations

import argparse
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Any]
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """A model with its inputs, and the nodes it is planned for."""

    make: Callable[[], tuple[nn.Module, Inputs]]
    nodes: int = 1


def ids(rows: int, length: int) -> Tensor:
    """Token ids or labels [rows, length]."""
    return torch.zeros(rows, length, dtype=torch.int64, device="meta")


def floats(*shape: int) -> Tensor:
    """Images, sounds or states of this shape."""
    return torch.zeros(*shape, dtype=BF16, device="meta")


def text(name: str, rows: int, length: int, nodes: int, **config: Any) -> Case:
    """A language model of transformers by its class; `config` is what differs from the default."""

    def make() -> tuple[nn.Module, Inputs]:
        import transformers  # noqa: PLC0415  (seconds, which --help does not need)

        kind = getattr(transformers, name)
        tokens = ids(rows, length)
        return kind(kind.config_class(**config)), {"input_ids": tokens, "labels": tokens}

    return Case(make, nodes)


class Denoiser(nn.Module):
    """A network of diffusers with a mean squared error."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, target: Tensor, **given: Any) -> Tensor:
        """The loss."""
        return nn.functional.mse_loss(self.network(**given, return_dict=False)[0].float(), target.float())


def images(name: str, target: tuple[int, ...], given: Callable[[], Inputs], nodes: int = 1, **config: Any) -> Case:
    """A network of diffusers by its class."""

    def make() -> tuple[nn.Module, Inputs]:
        import diffusers  # noqa: PLC0415

        return Denoiser(getattr(diffusers, name)(**config)), {**given(), "target": floats(*target)}

    return Case(make, nodes)


def whisper_large() -> tuple[nn.Module, Inputs]:
    """Radford et al. 2022, large-v3."""
    import transformers  # noqa: PLC0415

    config = transformers.WhisperConfig(
        d_model=1280, encoder_layers=32, decoder_layers=32, encoder_attention_heads=20, decoder_attention_heads=20,
        encoder_ffn_dim=5120, decoder_ffn_dim=5120, num_mel_bins=128, vocab_size=51866,
    )  # fmt: skip
    inputs = {"input_features": floats(256, 128, 3000), "labels": ids(256, 448)}
    return transformers.WhisperForConditionalGeneration(config), inputs


def clip_bigg() -> tuple[nn.Module, Inputs]:
    """OpenCLIP's ViT-bigG/14."""
    import transformers  # noqa: PLC0415

    config = transformers.CLIPConfig(
        text_config={
            "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20,
            "projection_dim": 1280,
        },
        vision_config={
            "hidden_size": 1664, "intermediate_size": 8192, "num_hidden_layers": 48, "num_attention_heads": 16,
            "patch_size": 14, "projection_dim": 1280,
        },
        projection_dim=1280,
    )  # fmt: skip
    inputs = {"input_ids": ids(16384, 77), "pixel_values": floats(16384, 3, 224, 224), "return_loss": True}
    return transformers.CLIPModel(config), inputs


def t5_xxl() -> tuple[nn.Module, Inputs]:
    """T5 1.1 XXL."""
    import transformers  # noqa: PLC0415

    config = transformers.T5Config(
        d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64, feed_forward_proj="gated-gelu",
        vocab_size=32128, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), {"input_ids": ids(512, 1024), "labels": ids(512, 256)}


CASES = {
    "qwen3-8b": text(
        "Qwen3ForCausalLM", 256, 4096, 1, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=151936,
    ),
    "qwen3-32b": text(
        "Qwen3ForCausalLM", 512, 4096, 8, hidden_size=5120, intermediate_size=25600, num_hidden_layers=64,
        num_attention_heads=64, num_key_value_heads=8, head_dim=128, vocab_size=151936,
    ),
    "qwen3-235b": text(
        "Qwen3MoeForCausalLM", 2048, 4096, 32, hidden_size=4096, moe_intermediate_size=1536, num_hidden_layers=94,
        num_attention_heads=64, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        vocab_size=151936, norm_topk_prob=True,
    ),
    "gpt-oss-20b": text(
        "GptOssForCausalLM", 256, 4096, 1, num_hidden_layers=24, num_local_experts=32, num_experts_per_tok=4
    ),
    "gpt-oss-120b": text(
        "GptOssForCausalLM", 1024, 4096, 16, num_hidden_layers=36, num_local_experts=128, num_experts_per_tok=4
    ),
    "gemma2-9b": text(
        "Gemma2ForCausalLM", 128, 8192, 1, hidden_size=3584, intermediate_size=14336, num_hidden_layers=42,
        num_attention_heads=16, num_key_value_heads=8, head_dim=256,
    ),
    "gemma3-27b": text(
        "Gemma3ForCausalLM", 512, 4096, 8, hidden_size=5376, intermediate_size=21504, num_hidden_layers=62,
        num_attention_heads=32, num_key_value_heads=16, head_dim=128, query_pre_attn_scalar=168, vocab_size=262208,
    ),
    "mistral-large": text(
        "MistralForCausalLM", 512, 8192, 16, hidden_size=12288, intermediate_size=28672, num_hidden_layers=88,
        num_attention_heads=96, num_key_value_heads=8, vocab_size=32768, sliding_window=None,
    ),
    "phi4": text(
        "Phi3ForCausalLM", 256, 4096, 1, hidden_size=5120, intermediate_size=17920, num_hidden_layers=40,
        num_attention_heads=40, num_key_value_heads=10, vocab_size=100352, pad_token_id=0,
        max_position_embeddings=16384, original_max_position_embeddings=16384,
    ),
    "bloom-176b": text(
        "BloomForCausalLM", 2048, 2048, 48, hidden_size=14336, n_layer=70, n_head=112, vocab_size=250880
    ),
    "opt-175b": text(
        "OPTForCausalLM", 1024, 2048, 48, hidden_size=12288, ffn_dim=49152, num_hidden_layers=96,
        num_attention_heads=96, word_embed_proj_dim=12288, dropout=0.0,
    ),
    "neox-20b": text(
        "GPTNeoXForCausalLM", 1024, 2048, 8, hidden_size=6144, intermediate_size=24576, num_hidden_layers=44,
        num_attention_heads=64, vocab_size=50432,
    ),
    "falcon-180b": text(
        "FalconForCausalLM", 1024, 2048, 64, hidden_size=14848, num_hidden_layers=80, num_attention_heads=232,
        num_kv_heads=8, new_decoder_architecture=True, vocab_size=65024,
    ),
    "olmo3-32b": text(
        "Olmo3ForCausalLM", 512, 8192, 8, hidden_size=5120, intermediate_size=27648, num_hidden_layers=64,
        num_attention_heads=40, num_key_value_heads=8, vocab_size=100352,
    ),
    "glm4-moe": text(
        "Glm4MoeForCausalLM", 2048, 4096, 32, hidden_size=5120, intermediate_size=12288, moe_intermediate_size=1536,
        num_hidden_layers=92, num_attention_heads=96, num_key_value_heads=8, head_dim=128, n_routed_experts=160,
        num_experts_per_tok=8, first_k_dense_replace=3, vocab_size=151552,
    ),
    "minimax-m2": text("MiniMaxM2ForCausalLM", 2048, 4096, 32),
    "kimi-k2": text(
        "DeepseekV3ForCausalLM", 8192, 4096, 128, hidden_size=7168, intermediate_size=18432,
        moe_intermediate_size=2048, num_hidden_layers=61, num_attention_heads=64, num_key_value_heads=64,
        n_routed_experts=384, n_group=1, topk_group=1, num_experts_per_tok=8, first_k_dense_replace=1,
        vocab_size=163840,
    ),
    "llama4-scout": text(
        "Llama4ForCausalLM", 512, 4096, 16, hidden_size=5120, intermediate_size=8192, intermediate_size_mlp=16384,
        num_hidden_layers=48, num_attention_heads=40, num_key_value_heads=8, num_local_experts=16, vocab_size=202048,
    ),
    "cohere-104b": text(
        "CohereForCausalLM", 512, 4096, 16, hidden_size=12288, intermediate_size=33792, num_hidden_layers=64,
        num_attention_heads=96, num_key_value_heads=8,
    ),
    "qwen3-next-4": text("Qwen3NextForCausalLM", 64, 4096, 1, num_hidden_layers=4),  # of 48 layers
    "mamba2-2.7b": text(
        "Mamba2ForCausalLM", 256, 2048, 1, hidden_size=2560, num_hidden_layers=64, num_heads=80, head_dim=64,
        n_groups=1, vocab_size=50288,
    ),
    "bert-large": text(
        "BertForMaskedLM", 4096, 512, 1, hidden_size=1024, intermediate_size=4096, num_hidden_layers=24,
        num_attention_heads=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ),
    "modernbert-large": text(
        "ModernBertForMaskedLM", 4096, 1024, 1, hidden_size=1024, intermediate_size=2624, num_hidden_layers=28,
        num_attention_heads=16,
    ),
    "deberta-xxl": text(
        "DebertaV2ForMaskedLM", 512, 512, 1, hidden_size=1536, intermediate_size=6144, num_hidden_layers=48,
        num_attention_heads=24, relative_attention=True, pos_att_type=["p2c", "c2p"], position_biased_input=False,
        max_relative_positions=-1, position_buckets=256, norm_rel_ebd="layer_norm", share_att_key=True,
        vocab_size=128100,
    ),
    "esm2-15b": text(
        "EsmForMaskedLM", 512, 1024, 2, hidden_size=5120, intermediate_size=20480, num_hidden_layers=48,
        num_attention_heads=40, vocab_size=33, position_embedding_type="rotary", token_dropout=False, pad_token_id=1,
        max_position_embeddings=1026,
    ),
    "t5-xxl": Case(t5_xxl, 2),
    "whisper-large": Case(whisper_large),
    "clip-bigg": Case(clip_bigg, 8),
    "flux": images(
        "FluxTransformer2DModel", (64, 4096, 64),
        lambda: {
            "hidden_states": floats(64, 4096, 64), "encoder_hidden_states": floats(64, 512, 4096),
            "pooled_projections": floats(64, 768), "timestep": floats(64), "img_ids": floats(4096, 3),
            "txt_ids": floats(512, 3), "guidance": floats(64),
        },
        guidance_embeds=True,
    ),
    "sd3.5-large": images(
        "SD3Transformer2DModel", (128, 16, 128, 128),
        lambda: {
            "hidden_states": floats(128, 16, 128, 128), "encoder_hidden_states": floats(128, 333, 4096),
            "pooled_projections": floats(128, 2048), "timestep": floats(128),
        },
        num_layers=38, num_attention_heads=38, caption_projection_dim=2432, pos_embed_max_size=192,
        qk_norm="rms_norm", sample_size=128, joint_attention_dim=4096,
    ),
    "sdxl": images(
        "UNet2DConditionModel", (128, 4, 128, 128),
        lambda: {
            "sample": floats(128, 4, 128, 128), "timestep": ids(128, 1)[:, 0],
            "encoder_hidden_states": floats(128, 77, 2048),
            "added_cond_kwargs": {"text_embeds": floats(128, 1280), "time_ids": floats(128, 6)},
        },
        sample_size=128, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(320, 640, 1280), transformer_layers_per_block=[1, 2, 10], attention_head_dim=[5, 10, 20],
        cross_attention_dim=2048, addition_embed_type="text_time", addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816, use_linear_projection=True,
    ),
    "wan-14b": images(
        "WanTransformer3DModel", (16, 16, 21, 60, 104),
        lambda: {
            "hidden_states": floats(16, 16, 21, 60, 104), "timestep": ids(16, 1)[:, 0],
            "encoder_hidden_states": floats(16, 512, 4096),
        },
        nodes=2,
    ),
    "cogvideox-5b": images(
        "CogVideoXTransformer3DModel", (16, 13, 16, 60, 90),
        lambda: {
            "hidden_states": floats(16, 13, 16, 60, 90), "encoder_hidden_states": floats(16, 226, 4096),
            "timestep": ids(16, 1)[:, 0], "image_rotary_emb": None,
        },
        num_attention_heads=48, num_layers=42, sample_height=60, sample_width=90,
    ),
}  # fmt: skip


def run(name: str) -> str:
    """Plan one case; the line that says what came of it."""
    from quality import describe  # noqa: PLC0415  (beside this file)

    import autopar  # noqa: PLC0415

    case = CASES[name]
    with torch.device("meta"):
        model, inputs = case.make()
    model = model.to(BF16)
    billions = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    started_s = time.process_time()
    plan = autopar.plan(model, autopar.Cluster.of("h100", nodes=case.nodes, devices_per_node=8), inputs)
    took_s = time.process_time() - started_s
    used_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return (
        f"{name:17} {billions:7.1f} {8 * case.nodes:5} {took_s:6.1f} {used_gib:5.1f} {plan.step_time_s:8.3f} "
        f"{plan.peak_memory_bytes / 2**30:5.1f} {plan.optimality_gap:6.1%}  {describe(plan):.100}"
    )


def main() -> None:
    """Each case in a process of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--case", choices=CASES, nargs="*", default=list(CASES))
    parser.add_argument("--seconds", type=float, default=600, help="for each case (default: 600)")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(*map(run, options.case), sep="\n")
        return
    print(f"{' '.join(sys.argv)}: torch {torch.__version__}, Python {platform.python_version()}")
    print(f"{'model':17} {'params':>6}B  GPUs  CPU s   GiB   step s  peak    gap  plan")
    for name in options.case:
        command = [sys.executable, __file__, "--here", "--case", name]
        try:
            made = subprocess.run(command, capture_output=True, text=True, timeout=options.seconds, check=False)
        except subprocess.TimeoutExpired:
            print(f"{name:17} no plan within {options.seconds:g} s", flush=True)
            continue
        lines = (made.stdout if not made.returncode else made.stderr).strip().splitlines()
        print(lines[-1][:200] if lines else f"{name}: ended with {made.returncode}", flush=True)


if __name__ == "__main__":
    main()
