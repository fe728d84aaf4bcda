"""transformers' Trainer on all processes, with the losses of one.

    torchrun --standalone --nproc-per-node 2 examples/train_with_trainer.py
    python examples/train_with_trainer.py --resume out/checkpoint-4        # goes on, on one process

Needs ``pip install 'transformers[torch]'``.  Ends with the plan and the numbers of an evaluation.
"""

import argparse
from typing import Any

import torch
from transformers import EvalPrediction, LlamaConfig, LlamaForCausalLM, TrainingArguments

from autopar.integrations.transformers import AutoparTrainer

CONFIG = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4)


def sequences(count: int, seed: int) -> list[dict[str, Any]]:
    """Bytes that count upwards from a random one."""
    starts = torch.randint(256, (count, 1), generator=torch.Generator().manual_seed(seed))
    texts = (starts + torch.arange(64)) % 256
    return [{"input_ids": text, "labels": text} for text in texts]


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """The share of bytes that were guessed."""
    return {"accuracy": float((prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]).mean())}


def main(arguments: argparse.Namespace) -> None:
    """Train, evaluate, save."""
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir=arguments.output,
        per_device_train_batch_size=16,
        accelerator_config={"split_batches": True},  # 16 in all, however many processes
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        max_steps=arguments.steps,
        logging_steps=1,
        save_steps=4,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = AutoparTrainer(
        model=LlamaForCausalLM(CONFIG),
        args=args,
        train_dataset=sequences(512, 0),
        eval_dataset=sequences(32, 1),
        compute_metrics=accuracy,
        parallelize_kwargs={"constraints": arguments.constraints},
    )
    trainer.train(resume_from_checkpoint=arguments.resume)
    numbers = trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(getattr(trainer.model, "plan", "one process, no plan"))
        print(f"evaluation: loss {numbers['eval_loss']:.6f}, accuracy {numbers['eval_accuracy']:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="out")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--resume", help="the folder of a checkpoint")
    parser.add_argument("--constraints", nargs="*", default=(), help="such as tensor=2 or pipeline=2")
    main(parser.parse_args())
