"""Train an unmodified transformers GPT-2 in two pipeline stages, on the text of `train_text.py` and with its loop.

    torchrun --standalone --nproc-per-node 4 examples/train_pipeline.py

Each stage runs on two processes; the embedding, which is also the head, is kept by both stages.  Other ways to run it:

    ... examples/train_pipeline.py --constraints pipeline=2                   # any schedule, any number of stages
    ... examples/train_pipeline.py --constraints schedule=zbv microbatches=4
"""

from train_text import main, read_arguments
from transformers import GPT2Config, GPT2LMHeadModel

CONFIG = GPT2Config(
    vocab_size=256,
    n_embd=256,
    n_layer=4,
    n_head=8,
    n_positions=256,
    # dropout would draw other numbers than a single device
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=0,
    eos_token_id=0,
    use_cache=False,
)

if __name__ == "__main__":
    main(lambda: GPT2LMHeadModel(CONFIG), read_arguments(__doc__, constraints=("stages=2",)))
