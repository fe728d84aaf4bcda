"""transformers' Trainer on ranks: what it logs, predicts and saves is what it does on one device."""

from __future__ import annotations

import functools
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.errors import MissingPackageError, TrainerError
from autopar.integrations.packages import optional
from tests.end_to_end.harness import launch

BATCH = 8  # rows, of all ranks
NUMBERS = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "eval_rows", "total_flos", "epoch")


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Texts of which a different part each counts, so that means of ranks are not means of tokens."""
    generator = torch.Generator().manual_seed(seed)
    texts = torch.randint(3, 64, (count, 12), generator=generator)
    skipped = torch.randint(0, 9, (count, 1), generator=generator)
    return [{"input_ids": x, "labels": x.where(torch.arange(12) >= n, -100)} for x, n in zip(texts, skipped)]  # noqa: B905


def metrics(prediction: Any) -> dict[str, Any]:
    chosen = prediction.predictions.argmax(-1)
    return {"accuracy": float((chosen == prediction.label_ids).mean()), "rows": len(prediction.label_ids)}


def arguments(folder: Path, ranks: int, **kwargs: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH // ranks, per_device_eval_batch_size=BATCH // ranks,
        gradient_accumulation_steps=2, num_train_epochs=2, learning_rate=1e-2, max_grad_norm=0.5,
        lr_scheduler_type="cosine", logging_steps=1, save_strategy="steps", save_steps=3,
        report_to=[], use_cpu=True, disable_tqdm=True, seed=5, **{"eval_strategy": "epoch", **kwargs},
    )  # fmt: skip


def own_optimizer(model: Any) -> Any:
    """What a script makes of its model and passes as ``optimizers=``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)


def trainer(
    kind: Any, folder: Path, ranks: int = 1, /, *, options: Any = None, optimizers: Any = None, **kwargs: Any
) -> Any:
    """A trainer of a small decoder; the last batch of an epoch is smaller, and so is that of an evaluation."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, attention_dropout=0.0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double()
    more: dict[str, Any] = {} if options is None else {"parallelize_kwargs": {"profile": False, **options}}
    if optimizers is not None:
        more["optimizers"] = optimizers(model)
    return kind(
        model=model, args=arguments(folder, ranks, **kwargs), train_dataset=rows(36, 0), eval_dataset=rows(13, 1),
        compute_metrics=metrics, **more,
    )  # fmt: skip


def history(trained: Any) -> list[dict[str, float]]:
    found = [{name: each[name] for name in NUMBERS if name in each} for each in trained.state.log_history]
    return [each for each in found if each]


def run(trained: Any, folder: Path, resume: str | None = None) -> dict[str, Any]:
    """Train, predict and save; what is to be equal."""
    trained.train(resume_from_checkpoint=resume)
    predicted = trained.predict(rows(7, 2))
    trained.save_model(str(folder / "final"))
    logits = torch.as_tensor(predicted.predictions).double()
    before = 0 if resume is None else len(json.loads(Path(resume, "trainer_state.json").read_text())["log_history"])
    return {
        "history": history(trained)[before:],
        "logits": logits.sum((0, 1)).tolist(),
        "loss": predicted.metrics["test_loss"],
        "rows": [len(predicted.predictions), len(predicted.label_ids)],
    }


def assert_equal(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-6) -> None:
    """The Trainer logs in float32, and the model computes its loss so."""
    steps = len(found["history"])
    assert 0 < steps <= len(expected["history"])
    for own, wanted in zip(found["history"], expected["history"][-steps:], strict=True):
        assert own == pytest.approx(wanted, rel=tolerance, abs=1e-9)
    assert found["loss"] == pytest.approx(expected["loss"], rel=tolerance)
    assert found["rows"] == expected["rows"]
    assert found["logits"] == pytest.approx(expected["logits"], rel=100 * tolerance, abs=tolerance)


def as_torchrun() -> None:
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # read, not used: the process group is there


def check_training(folder: Path, name: str, constraints: tuple[str, ...], resume: str | None = None) -> None:
    from transformers import LlamaForCausalLM

    from autopar.integrations.transformers import AutoparTrainer

    as_torchrun()
    own = folder / name
    trained = trainer(AutoparTrainer, own, dist.get_world_size(), options={"constraints": constraints})
    found = run(trained, own, resume)
    assert_equal(found, json.loads((folder / "expected.json").read_text()))
    if dist.get_rank() == 0:
        again = LlamaForCausalLM.from_pretrained(own / "final", dtype=torch.float64)
        logits = again(torch.stack([x["input_ids"] for x in rows(7, 2)])).logits.sum((0, 1))
        torch.testing.assert_close(logits, torch.tensor(found["logits"], dtype=torch.float64), rtol=1e-5, atol=1e-6)


def check_loss_outside(folder: Path) -> None:
    """Label smoothing computes its loss of the logits, not known before the first backward comes to them."""
    from autopar.integrations.transformers import AutoparTrainer

    as_torchrun()
    kwargs = {"label_smoothing_factor": 0.1, "max_steps": 2}
    trained = trainer(AutoparTrainer, folder / "smooth", 2, options={"constraints": "pipeline=2"}, **kwargs)
    trained.train()
    assert history(trained) == [
        pytest.approx(each, rel=1e-6) for each in json.loads((folder / "smooth.json").read_text())
    ]


def prompting(*mixins: Any) -> Any:
    """A trainer whose batches are lists of prompts: its model writes what it is trained on, in an order drawn anew."""
    from accelerate.utils import set_seed
    from transformers import Trainer

    class Prompting(Trainer):
        def __init__(self, model: Any, **kwargs: Any) -> None:
            forward = model.forward
            model.forward = functools.wraps(forward)(lambda *args, **kwargs: forward(*args, **kwargs))
            super().__init__(model=model, **kwargs)
            self.data_collator = list
            set_seed(3, device_specific=True)

        def _prepare_inputs(self, inputs: Any) -> Any:
            prompts = torch.stack([each["input_ids"][:4] for each in inputs])
            with torch.no_grad():
                texts = self.model.generate(prompts, max_new_tokens=4, do_sample=True, pad_token_id=0)
            return {"input_ids": texts[torch.randperm(len(texts))]}

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            logits = model(input_ids=inputs["input_ids"]).logits
            return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["input_ids"][:, 1:].flatten())

    return type("Prompting", (*mixins, Prompting), {})


def train_prompting(kind: Any, folder: Path, ranks: int = 1, options: Any = None) -> list[dict[str, float]]:
    made = trainer(kind, folder, ranks, options=options, eval_strategy="no", max_steps=3)
    made.train()
    return history(made)


def check_prompting(folder: Path) -> None:
    from autopar.integrations.transformers import AutoparTrainerMixin

    as_torchrun()
    example = {"input_ids": torch.zeros(BATCH, 8, dtype=torch.long)}
    options = {"constraints": "data=2", "example_inputs": example}
    found = train_prompting(prompting(AutoparTrainerMixin), folder / "prompting2", 2, options)
    assert found == [pytest.approx(each, rel=1e-6) for each in json.loads((folder / "prompting.json").read_text())]


def check_own_optimizer(folder: Path) -> None:
    """An optimizer of the parameters of the model that is passed trains the parallel one's; scripts then go on with
    the model that they passed.
    """
    from autopar.integrations.transformers import AutoparTrainer

    as_torchrun()
    expected = json.loads((folder / "own.json").read_text())
    passed: list[Any] = []

    def optimizer_of(model: Any) -> Any:
        passed.append(model)
        return own_optimizer(model)

    for plan in ("zero=3", "pipeline=2"):
        kwargs: dict[str, Any] = {"optimizers": optimizer_of, "max_steps": 3}
        trained = trainer(AutoparTrainer, folder / f"own {plan}", 2, options={"constraints": plan}, **kwargs)
        trained.train()
        assert history(trained) == [pytest.approx(each, rel=1e-6) for each in expected]
        state = trained.model.full_state_dict()
        assert all(torch.equal(x, state[name]) for name, x in passed.pop().state_dict().items())


@pytest.mark.slow
def test_trainer_on_two_and_four_ranks(tmp_path: Path) -> None:
    """Also goes on from one process to two, from two to four, and back."""
    pytest.importorskip("accelerate")
    from transformers import Trainer

    from autopar.integrations.transformers import AutoparTrainer

    expected = run(trainer(Trainer, tmp_path / "one"), tmp_path / "one")
    (tmp_path / "expected.json").write_text(json.dumps(expected))
    assert_equal(run(trainer(AutoparTrainer, tmp_path / "alone", options={}), tmp_path / "alone"), expected, 1e-12)
    smooth = trainer(Trainer, tmp_path / "smooth1", label_smoothing_factor=0.1, max_steps=2)
    smooth.train()
    (tmp_path / "smooth.json").write_text(json.dumps(history(smooth)))
    (tmp_path / "prompting.json").write_text(json.dumps(train_prompting(prompting(), tmp_path / "prompting")))

    own = trainer(Trainer, tmp_path / "own1", optimizers=own_optimizer, max_steps=3)
    own.train()
    (tmp_path / "own.json").write_text(json.dumps(history(own)))
    launch(
        2,
        partial(check_prompting, tmp_path),
        partial(check_training, tmp_path, "zero", ("data=2", "zero=3")),
        partial(check_training, tmp_path, "staged", ("pipeline=2",), str(tmp_path / "alone" / "checkpoint-3")),
        partial(check_loss_outside, tmp_path),
        partial(check_own_optimizer, tmp_path),
    )
    launch(
        4,
        partial(
            check_training, tmp_path, "four_staged", ("pipeline=2", "data=2"), str(tmp_path / "zero" / "checkpoint-3")
        ),
    )
    back = trainer(AutoparTrainer, tmp_path / "back", options={})
    assert_equal(run(back, tmp_path / "back", str(tmp_path / "zero" / "checkpoint-3")), expected)
    assert sorted(x.name for x in (tmp_path / "zero").iterdir()) == ["checkpoint-3", "checkpoint-6", "final"]


REFUSED = [
    ({"gradient_checkpointing": True}, "recompute=full"),
    ({"torch_compile": True}, "'compile': True"),
    ({"neftune_noise_alpha": 5.0}, "add the noise in the model"),
    ({"auto_find_batch_size": True}, "choose the batch size"),
    ({"fp16": True}, "bf16=True"),
    ({"train_sampling_strategy": "batch_rebalance"}, "group_by_length"),
]


def check_refusals(folder: Path) -> None:
    from autopar.integrations.transformers import AutoparTrainer

    as_torchrun()
    for kwargs, text in REFUSED:
        changes = "has no place in a model that runs a plan" if "train_sampling_strategy" not in kwargs else ""
        with pytest.raises(TrainerError, match=f"{changes}.*{text}"):
            trainer(AutoparTrainer, folder, 2, options={}, **kwargs)
    with pytest.raises(TrainerError, match="leave it out"):
        trainer(AutoparTrainer, folder, 2, options={"inputs": "local"})
    trained = trainer(AutoparTrainer, folder, 2, options={"constraints": "data=2"})
    with pytest.raises(TrainerError, match="search on one process"):
        trained.hyperparameter_search()
    with pytest.raises(TrainerError, match="another Trainer saved it"):
        trained.train(resume_from_checkpoint=str(folder / "other" / "checkpoint-3"))


@pytest.mark.slow
def test_what_changes_the_model_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import Trainer

    trainer(Trainer, tmp_path / "other", max_steps=3).train()
    launch(2, partial(check_refusals, tmp_path))


def test_a_missing_package_is_named() -> None:
    with pytest.raises(MissingPackageError, match=r"'no_such_package' is not installed: pip install some\[extra\]"):
        optional("no_such_package", "some[extra]")
    with pytest.raises(ImportError):
        optional("no_such_package", "some")


def test_the_plan_is_for_what_a_compute_loss_calls_the_model_with(tmp_path: Path) -> None:
    transformers = optional("transformers", "transformers[torch]")
    mixin = optional("autopar.integrations.transformers", "transformers[torch]").AutoparTrainerMixin

    class Scaled(mixin, transformers.Trainer):
        def compute_loss(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> Any:
            return model(**inputs, output_hidden_states=True).loss

    class KeepsLabels(mixin, transformers.Trainer):
        def compute_loss(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> Any:
            labels = inputs.pop("labels")
            return torch.nn.functional.cross_entropy(model(**inputs).logits.flatten(0, 1), labels.flatten())

    kinds: list[Any] = [Scaled, KeepsLabels]
    called, plain = (trainer(kind, tmp_path)._example_inputs() for kind in kinds)
    assert called["output_hidden_states"] is True
    assert called["labels"].shape == plain["labels"].shape == (BATCH, 12)  # stages need the model's own loss
    assert "output_hidden_states" not in plain


def test_the_plan_is_for_the_first_batch_of_training(tmp_path: Path) -> None:
    """Rows come in another order than in the dataset, and batches of other rows may have another length."""
    mixin = optional("autopar.integrations.transformers", "transformers[torch]").AutoparTrainerMixin
    transformers = optional("transformers", "transformers[torch]")

    class Remembers(mixin, transformers.Trainer):
        def compute_loss(self, model: Any, inputs: dict[str, Any], *rest: Any, **kwargs: Any) -> Any:
            seen.append(inputs["input_ids"])
            untyped: Any = super()
            return untyped.compute_loss(model, inputs, *rest, **kwargs)

    seen: list[torch.Tensor] = []
    kind: Any = Remembers
    made = trainer(kind, tmp_path, max_steps=1)
    planned = made._example_inputs()["input_ids"]
    seen.clear()
    made.train()
    assert torch.equal(planned, seen[0])


def test_batches_that_are_lists_are_refused_by_name(tmp_path: Path) -> None:
    mixin = optional("autopar.integrations.transformers", "transformers[torch]").AutoparTrainerMixin
    transformers = optional("transformers", "transformers[torch]")

    class Prompting(mixin, transformers.Trainer):
        """Like trainers whose model writes what it is trained on."""

    kind: Any = Prompting
    made = trainer(kind, tmp_path)
    made.data_collator = list
    with pytest.raises(TrainerError, match=r"are a list.*example_inputs"):
        made._example_inputs()
