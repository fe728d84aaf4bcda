"""Whole models for the tests of the search across layers, written op by op, options from the factor rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopar.program import Layer, Program, Ref
from tests.search.inner_programs import Builder, decoder_layer


@dataclass
class ModelBuilder(Builder):
    """Cuts the ops that it collects into layers; parameters carry the layer's name."""

    layers: list[Layer] = field(default_factory=list)
    cut_at: int = 0
    prefix: str = "embedding."

    def add(self, name: str, shape: Sequence[int], role: str, *, grad: bool = True, dtype: str = "") -> str:
        own = role == "parameter" and "." not in name
        return super().add(f"{self.prefix}{name}" if own else name, shape, role, grad=grad, dtype=dtype)

    def cut(self, kind: int, outputs: tuple[str, ...], prefix: str = "") -> None:
        """End a layer here."""
        ops = tuple(replace(op, module=self.prefix.rstrip(".")) for op in self.ops[self.cut_at :])
        read = list(dict.fromkeys(name for op in ops for name in op.operands))
        made = {name for op in ops for name in op.results}
        held = tuple(n for n in read if self.values[n].role in ("parameter", "constant"))
        inputs = tuple(n for n in read if n not in made and n not in held)
        self.layers.append(Layer(self.prefix.rstrip("."), kind, ops, inputs, held, outputs))
        self.cut_at, self.prefix = len(self.ops), prefix

    def whole(self, inputs: tuple[str, ...], outputs: tuple[str, ...], loss: str) -> Program:
        parameters = {name: name for name, value in self.values.items() if value.role == "parameter"}
        return Program(dict(self.values), tuple(self.layers), inputs, parameters, {}, outputs, loss, fingerprint="test")


def decoder_model(
    num_layers: int = 4,
    batch: int = 8,
    seq: int = 4096,
    vocabulary: int = 128256,
    *,
    tied: bool = False,
    **sizes: int,
) -> Program:
    """Embedding, decoder layers, classifier with the mean cross entropy over labels that count."""
    hidden = sizes.get("hidden", 4096)
    b = ModelBuilder()
    ids = b.add("ids", (batch, seq), "input", grad=False, dtype="int64")
    labels = b.add("labels", (batch, seq), "input", grad=False, dtype="int64")
    table = b.add("weight", (vocabulary, hidden), "parameter")
    x = b.op("aten.embedding.default", (Ref(table), Ref(ids)), (batch, seq, hidden))
    b.cut(0, (x,), "blocks.0.")
    block = decoder_layer(batch, seq, **sizes)
    for index in range(num_layers):
        x = _append(b, block, x, index)
        b.cut(1, (x,), f"blocks.{index + 1}." if index + 1 < num_layers else "head.")
    head = table if tied else b.add("weight", (vocabulary, hidden), "parameter")
    logits = b.op("aten.linear.default", (Ref(x), Ref(head)), (batch, seq, vocabulary))
    flat = b.op("aten.view.default", (Ref(logits), (batch * seq, vocabulary)), (batch * seq, vocabulary))
    target = b.op("aten.view.default", (Ref(labels), (batch * seq,)), (batch * seq,), "int64")
    arguments = (Ref(flat), Ref(target), None, 1, -100, 0.0, "sum")
    total = b.op("autopar.cross_entropy", arguments, (), "float32")
    count_arguments = (Ref(target), None, -100, vocabulary)
    count = b.op("autopar.cross_entropy_denominator", count_arguments, (), "float32")
    loss = b.op("aten.div.Tensor", (Ref(total), Ref(count)), (), "float32")
    b.cut(2, (loss,))
    return b.whole((ids, labels), (loss,), loss)


def _append(b: ModelBuilder, block: Program, x: str, index: int) -> str:
    """Append the ops of a one-layer program, reading `x`; its output's name."""
    layer = block.layers[0]
    names = {layer.inputs[0]: x}
    for name in layer.state:
        value = block.values[name]
        if value.role == "constant":
            names[name] = name
            b.values.setdefault(name, value)
        else:
            names[name] = b.add(name, value.type.shape, value.role)
    for op in layer.ops:
        for name in op.results:
            names[name] = f"{name}.{index}"
            b.values[names[name]] = replace(block.values[name], name=names[name])
        b.ops.append(
            replace(
                op,
                name=f"{op.name}.{index}",
                args=_rename(op.args, names),
                results=tuple(names[name] for name in op.results),
            )
        )
    return names[layer.outputs[0]]


def _rename(arg: object, names: dict[str, str]) -> object:
    if isinstance(arg, Ref):
        return Ref(names[arg.name])
    return tuple(_rename(part, names) for part in arg) if isinstance(arg, tuple) else arg
