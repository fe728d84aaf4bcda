"""The README's first ten minutes, typed as they are printed; and its first example, on two processes."""

import re
from pathlib import Path

import pytest

from tests.docs.printed import assert_prints, read_commands, read_files, run_as_printed, run_forked
from tests.ranks import REPOSITORY

README = (REPOSITORY / "README.md").read_text()
MODEL = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

torch.manual_seed(0)
ids = torch.randint(32, (4, 16))


def MyModel():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                                        num_attention_heads=2))
"""

SAYS = 'print(f"loss {loss.item()}\\n", end="", flush=True)\n'  # one write, which another rank's can't split


@pytest.mark.slow
def test_the_first_ten_minutes_print_what_the_readme_says(tmp_path: Path) -> None:
    for name, text in read_files(README).items():
        (tmp_path / name).write_text(text)
    commands = read_commands(README)
    assert [command.split()[0] for command, _ in commands] == ["autopar", "torchrun", "python"]
    for command, said in commands:
        run = run_forked if command.startswith("python ") else run_as_printed
        assert_prints(command, said, run(command, tmp_path))


@pytest.mark.slow
def test_the_changed_lines_of_a_script_give_its_loss(tmp_path: Path) -> None:
    """A model and its inputs are put before the lines, and what they give is printed after them."""
    (block,) = re.findall(r"^```diff\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    lines = block.replace('"cuda"', '"cpu"').splitlines()
    before, after = ("\n".join([MODEL, *kept, SAYS]) for kept in (
        [line[1:] for line in lines if not line.startswith("+")], [line[1:] for line in lines]))  # fmt: skip
    (tmp_path / "before.py").write_text(before)
    (tmp_path / "after.py").write_text(after)
    alone = run_forked("python before.py", tmp_path).split()
    both = run_forked("torchrun --standalone --nproc-per-node 2 after.py", tmp_path).split()
    assert len(both) == 4
    assert [float(both[1]), float(both[3])] == pytest.approx([float(alone[1])] * 2, rel=1e-6)
