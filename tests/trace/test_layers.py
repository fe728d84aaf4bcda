"""Where programs are cut, and which layers are alike."""

from collections import Counter

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F  # noqa: N812

from autopar.errors import TraceError
from autopar.trace import LayerNeeds, trace
from autopar.trace.layers.repetition import MAX_OPS, find_period
from tests import models
from tests.trace.interpreter import check_equals_model, check_well_formed

IDS = models.tokens(4, 16, 64)


def kinds_of(program):
    return [layer.kind for layer in program.layers]


def t5():
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, decoder_start_token_id=0,
        pad_token_id=0,
        dropout_rate=0.0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), {"input_ids": IDS, "labels": IDS}


def gemma():
    config = transformers.Gemma3TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=8,
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config), {"input_ids": IDS, "labels": IDS}


def clip():
    models.skip_before_transformers_5("CLIP's mask is float32 with the least float64, which torch.full refuses")
    text = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
        "max_position_embeddings": 16,
        "eos_token_id": 63,
        "bos_token_id": 1,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 4,
    }
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    return transformers.CLIPModel(config), {
        "input_ids": IDS, "pixel_values": torch.randn(4, 3, 16, 16), "attention_mask": torch.ones_like(IDS),
        "return_loss": True,
    }  # fmt: skip


def albert():
    config = transformers.AlbertConfig(
        vocab_size=64, hidden_size=32, embedding_size=16, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4,
    )  # fmt: skip
    return transformers.AlbertForMaskedLM(config), {"input_ids": IDS, "labels": IDS}


def resnet():
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], num_labels=3)
    return transformers.ResNetForImageClassification(config), {
        "pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.tensor([0, 1, 2, 0]),
    }  # fmt: skip


def llama_with_positions():
    model, inputs = models.make_llama(batch=4, layers=3)
    return model, inputs | {"position_ids": torch.arange(16).expand(4, 16) + torch.arange(4)[:, None]}


REAL = {
    # the last of a tower differs: its output leaves the program; the first of T5's computes the shared
    # position bias
    t5: [0, 1, 2, 2, 3, 4, 5, 5, 6],
    gemma: [0, 1, 1, 1, 1, 1, 2, 3],
    clip: [0, 1, 1, 2, 3, 4, 4, 5],
    albert: [0, 1, 1, 1, 1, 2],
    resnet: [0, 1, 2, 3],
    llama_with_positions: [0, 1, 1, 1, 2],
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "make",
    [pytest.param(make, marks=pytest.mark.slow) if make in (t5, gemma, clip, resnet) else make for make in REAL],
    ids=lambda make: make.__name__,
)
def test_real_models(make):
    model, inputs = make()
    assert kinds_of(check_equals_model(model, inputs, training=False).program) == REAL[make]


@pytest.mark.slow
def test_kinds_do_not_grow_with_depth():
    deep = trace(*_positional(models.make_llama(batch=2, layers=5))).program
    assert kinds_of(deep) == [0, 1, 1, 1, 1, 1, 2]
    assert [layer.name for layer in deep.layers][1:3] == ["model.layers.0", "model.layers.1"]


def _positional(made):
    model, inputs = made
    return model, (), inputs


class FlatGPT(nn.Module):
    """Blocks as a loop in one forward: no module repeats."""

    def __init__(self, layers=6, width=32):
        super().__init__()
        shapes = (
            (width,),
            (3 * width, width),
            (width, width),
            (width,),
            (4 * width, width),
            (width, 4 * width),
        )
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(*s) / 8) for _ in range(layers) for s in shapes)
        self.embedding = nn.Parameter(torch.randn(64, width))
        self.layers = layers

    def forward(self, ids):
        h = self.embedding[ids]
        for k in range(self.layers):
            a, qkv, out, c, up, down = self.weights[6 * k : 6 * k + 6]
            mixed = F.linear(F.layer_norm(h, (32,), a), qkv).view(4, 16, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
            mixed = F.scaled_dot_product_attention(*mixed, is_causal=True).transpose(1, 2).reshape(4, 16, 32)
            h = h + F.linear(mixed, out)
            h = h + F.linear(F.gelu(F.linear(F.layer_norm(h, (32,), c), up)), down)
        return F.cross_entropy((h @ self.embedding.T).flatten(0, 1), ids.flatten())


def test_a_flat_function_is_cut_where_it_repeats():
    program = check_equals_model(FlatGPT(), {"ids": IDS}).program
    counts = Counter(kinds_of(program))
    assert max(counts.values()) == 6
    assert len(counts) == 3
    (repeated,) = [layer for layer in program.kinds if counts[layer.kind] == 6]
    assert sum("attention" in op.target for op in repeated.ops) == 1
    assert (len(repeated.inputs), len(repeated.outputs)) == (1, 1)


def test_tiny_repetitions_share_a_layer():
    model = nn.Sequential(*[part for _ in range(40) for part in (nn.Linear(8, 8), nn.ReLU())])
    program = trace(model, (torch.randn(4, 8),), {}).program
    assert 10 <= len(program.layers) <= 16
    assert max(Counter(kinds_of(program)).values()) >= 10


class Conv(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.conv = nn.Conv2d(before, after, 3, padding=1)
        self.norm = nn.BatchNorm2d(after)

    def forward(self, x):
        return F.silu(self.norm(self.conv(x))) * 0.9


class DeepUNet(nn.Module):
    """Skips over a bottleneck, no two levels alike, no module list."""

    def __init__(self, levels=5):
        super().__init__()
        widths = [4 * 2**k for k in range(levels)]
        for k in range(levels):
            self.add_module(
                f"down{k}",
                nn.Sequential(Conv(3 if k == 0 else widths[k - 1], widths[k]), Conv(widths[k], widths[k])),
            )
        for k in range(levels - 1):
            self.add_module(f"up{k}", nn.ConvTranspose2d(widths[k + 1], widths[k], 2, 2))
            self.add_module(f"merge{k}", Conv(2 * widths[k], widths[k]))
        self.levels = levels
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, x):
        skips = []
        for k in range(self.levels):
            x = getattr(self, f"down{k}")(F.max_pool2d(x, 2) if k else x)
            skips.append(x)
        for k in reversed(range(self.levels - 1)):
            x = getattr(self, f"merge{k}")(torch.cat([getattr(self, f"up{k}")(x), skips[k]], 1))
        return self.head(x).square().mean()


@pytest.mark.slow
def test_skip_connections_cross_cuts():
    traced = check_equals_model(DeepUNet(), {"x": torch.randn(2, 3, 32, 32)})
    layers = traced.program.layers
    assert 2 <= len(layers) <= 12
    assert all(len(layer.ops) <= 60 for layer in layers)
    assert any(sum(traced.program.values[n].role == "op" for n in layer.inputs) > 1 for layer in layers)


@pytest.mark.slow
def test_no_layer_is_too_long():
    class Long(nn.Module):
        def __init__(self):
            super().__init__()
            self.scales = nn.ParameterList(nn.Parameter(torch.rand(8)) for _ in range(9))

        def forward(self, x):
            for index in range(400):
                x = torch.sin(x) * self.scales[(index * index) % 7] + index
            return x

    program = trace(Long(), (torch.randn(4, 8),), {}).program
    check_well_formed(program)
    assert all(len(layer.ops) <= MAX_OPS for layer in program.layers)
    assert len(program.layers) < 400


@pytest.mark.parametrize(("sequence", "expected"), [
    ([7, 1, 2, 1, 2, 1, 2, 9], (1, 2, 3)),
    ([1, 1, 1, 1], (0, 1, 4)),
    ([1, 2, 3], None),
    ([], None),
    ([5, 1, 1, 2, 1, 1, 2, 1, 1, 2, 6], (1, 3, 3)),
])  # fmt: skip
def test_find_period(sequence, expected):
    assert find_period(sequence) == expected


# ---------------------------------------------------------------- what makes kinds differ


def test_frozen_layers_are_another_kind():
    model, inputs = models.make_plain_gpt(batch=2, layers=4)
    for parameter in model.blocks[1].parameters():
        parameter.requires_grad_(False)
    program = check_equals_model(model, inputs).program
    assert kinds_of(program) == [0, 1, 2, 1, 1, 3]
    frozen = next(name for name, member in program.parameters.items() if member == "blocks.1.qkv.weight")
    assert not program.values[frozen].requires_grad
    assert program.values[frozen].role == "parameter"


def test_a_layer_with_a_shared_weight_is_another_kind():
    model, inputs = models.make_plain_gpt(batch=2, layers=4)
    model.blocks[2].out.weight = model.blocks[1].out.weight
    program = check_equals_model(model, inputs).program
    assert kinds_of(program) == [0, 1, 2, 2, 1, 3]
    assert program.aliases == {"blocks.2.out.weight": "blocks.1.out.weight"}
    assert list(program.parameters.values()).count("blocks.1.out.weight") == 1


def test_tied_head_is_one_parameter():
    model, inputs = models.make_gpt2(batch=2, layers=2)
    program = trace(model, (), inputs).program
    assert program.aliases == {"lm_head.weight": "transformer.wte.weight"}
    (tied,) = [name for name, member in program.parameters.items() if member == "transformer.wte.weight"]
    assert sum(tied in layer.state for layer in program.layers) == 2


def test_unused_parameters_are_listed():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used = nn.Linear(8, 8)
            self.unused = nn.Linear(8, 8)

        def forward(self, x):
            return self.used(x)

    program = trace(Unused(), (torch.randn(4, 8),), {}).program
    assert set(program.parameters.values()) == {f"{m}.{p}" for m in ("used", "unused") for p in ("weight", "bias")}
    held = {program.parameters[name] for layer in program.layers for name in layer.state}
    assert held == {"used.weight", "used.bias"}


# ---------------------------------------------------------------- identity, sources, other devices


@pytest.mark.slow
def test_fingerprint_is_of_structure():
    def fingerprint(**changes):
        model, inputs = models.make_plain_gpt(**({"batch": 2, "layers": 2} | changes))
        return trace(model, (), inputs).program.fingerprint

    torch.manual_seed(1)
    first = fingerprint()
    torch.manual_seed(2)
    assert fingerprint() == first
    assert len({first, fingerprint(batch=4), fingerprint(layers=3), fingerprint(dropout=0.1)}) == 4


def test_source_and_module_of_ops():
    model, inputs = models.make_plain_gpt(batch=2)
    program = trace(model, (), inputs).program
    op = next(op for layer in program.layers for op in layer.ops if "attention" in op.target)
    path, _, line = op.source.rpartition(":")
    assert path == models.__file__
    with open(path) as lines:  # noqa: PTH123
        assert "scaled_dot_product_attention" in lines.readlines()[int(line) - 1]
    assert op.module == "blocks.0"


@pytest.mark.slow
def test_meta_model_is_the_same_program():
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=8, n_positions=64)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    real = transformers.GPT2LMHeadModel(config)
    inputs = {"input_ids": IDS, "labels": IDS}
    on_meta = trace(model, (), {name: t.to("meta") for name, t in inputs.items()}).program
    assert on_meta == trace(real, (), inputs).program
    check_well_formed(on_meta)


def test_rotary_tables_are_computed_once_a_step_from_their_buffer():
    model, inputs = models.make_llama(batch=2, layers=2)
    program = trace(model, (), inputs).program
    check_well_formed(program)
    assert [program.parameters[n] for op in program.hoisted for n in op.operands if n in program.parameters] == [
        "model.rotary_emb.inv_freq"
    ]
    assert trace(model.to("meta"), (), inputs).program == program
    assert kinds_of(program) == [0, 1, 1, 2]


def test_layers_are_divided_so_that_each_has_a_stage_that_holds_what_it_reads():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    whole = trace(model, (torch.randn(4, 8),), {}).program
    assert len(whole.layers) == 1
    stages = {"0.weight": {0}, "0.bias": {0}, "1.weight": {0, 1}, "1.bias": {0}, "2.weight": {1}, "3.weight": {1, 2}}
    stages_of = {name: frozenset(held) for name, held in stages.items()}
    program = trace(model, (torch.randn(4, 8),), {}, needs=LayerNeeds(stages_of)).program
    read = [[program.parameters[name] for name in layer.state] for layer in program.layers]
    assert read == [["0.weight", "0.bias", "1.weight", "1.bias"], ["2.weight", "2.bias", "3.weight", "3.bias"]]
    check_well_formed(program)


def test_what_several_stages_hold_runs_in_the_first_of_them() -> None:
    """Else the first stage of a model whose first and last weights are tied has no layer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    model[2].weight = model[0].weight
    stages_of = {f"{number}.{kind}": frozenset({1}) for number in range(3) for kind in ("weight", "bias")}
    stages_of |= dict.fromkeys(("0.weight", "2.weight", "0.bias"), frozenset({0, 1}))
    program = trace(model, (torch.randn(4, 8),), {}, needs=LayerNeeds(stages_of)).program
    read = [[program.parameters[name] for name in layer.state] for layer in program.layers]
    assert read == [["0.weight", "0.bias"], ["1.weight", "1.bias", "0.weight", "2.bias"]]


@pytest.mark.slow
def test_small_models_are_cut_into_as_many_layers_as_stages_need():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8), nn.ReLU(),
                          nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))  # fmt: skip

    def read(count: int, rows: int = 4) -> list[list[str]]:
        program = trace(model, (torch.randn(rows, 1, 4, 4),), {}, needs=LayerNeeds(count=count)).program
        check_well_formed(program)
        roles = [{n: program.values[n].role for n in layer.state} for layer in program.layers]
        return [sorted({program.parameters[n][0] for n, role in each.items() if role == "parameter"}) for each in roles]

    assert read(1) == [["0", "1", "4", "6", "8"]]
    assert read(2) == [["0", "1"], ["4", "6", "8"]]
    assert read(4) == read(4, rows=64) == [["0"], ["1"], ["4"], ["6", "8"]]
    assert len(read(9)) == 5  # no layer without parameters


def test_a_forward_without_ops_is_refused() -> None:
    with pytest.raises(TraceError, match="runs no op on a tensor"):
        trace(nn.Identity(), (torch.ones(4, 4),), {}, needs=LayerNeeds(count=2))
