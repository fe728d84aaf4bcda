"""The examples in the docstrings of public names run, and print what they say."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

import autopar


class Documents(list[dict[str, Tensor]]):
    """Samples that know how long they are."""

    @property
    def lengths(self) -> list[int]:
        return [len(each["input_ids"]) for each in self]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the examples take for granted, on one process: a mesh of CUDA devices is one of this process."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64,
        max_position_embeddings=1 << 17, use_cache=False,
    )  # fmt: skip
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    made = init_device_mesh("cpu", (1,))
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))
    dataset = Documents({"input_ids": row, "labels": row} for row in ids.repeat(16, 1))
    yield {
        "torch": torch, "nn": nn, "DataLoader": DataLoader, "dataset": dataset, "documents": dataset, "model": model,
        "ids": ids, "mesh": made, "x": torch.randn(8, 4), "y": torch.arange(8) % 4, "config": config,
        "Model": transformers.LlamaForCausalLM, "init_device_mesh": lambda *_: made,
    }  # fmt: skip
    dist.destroy_process_group()


def prepared(name: str, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the example of one name needs beside."""
    ids, model = names["ids"], names["model"]
    both = {"input_ids": ids, "labels": ids}
    monkeypatch.setattr(autopar, "parallelize", partial(autopar.parallelize, profile=False), raising=False)
    if name == "shard_dataloader":
        return {"model": autopar.parallelize(model, names["mesh"], both, inputs="local")}
    if name == "balanced":
        packed = both | {"position_ids": torch.arange(16).expand(4, 16)}
        return {"model": autopar.parallelize(model, names["mesh"], packed, inputs="local")}
    if name == "verify":
        return {"plan": autopar.plan(model, autopar.Cluster.of("cpu", devices_per_node=2), both)}
    if name == "BatchPlanner":
        rows = torch.empty(2, 1 << 17, dtype=torch.int64, device="meta")
        cluster = autopar.Cluster.of("h100", devices_per_node=2)
        meta = {"input_ids": rows, "labels": rows}
        return {"plan": autopar.plan(model, cluster, meta, constraints=["data=2", "microbatches=1"])}
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("name", autopar.__all__)
def test_the_example_of_a_public_name_runs(
    name: str, names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (inspect.getdoc(getattr(autopar, name)) or "").partition("Example:\n")[2]
    if name == "parallelize":  # its second example has another model
        first, _, second = text.partition("With the loss outside")
        texts = (first, "\n".join(line for line in second.splitlines() if ">>>" in line))
    else:
        texts = (text,)
    for number, each in enumerate(texts):
        own = {"autopar": autopar} | names | prepared(name, names, monkeypatch)
        if number:
            own["model"] = nn.Linear(4, 4)
        test = doctest.DocTestParser().get_doctest(each, own, name, None, None)
        assert test.examples
        said: list[str] = []
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        assert runner.run(test, out=said.append).failed == 0, "".join(said)
