"""Laws of the whole package: what it may import, and the words that it may not know."""

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import autopar
from autopar import errors

PACKAGE = Path(autopar.__file__).parent
TEXTS = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}

# Names of model families: planning must come out of rules, costs and search alone.  Long names count wherever
# they stand, short ones (parts of many words) only where no letter touches them.
LONG = "llama gpt (?<!num)(?<!mem)bert mixtral mistral qwen gemma deepseek falcon mamba whisper siglip resnet"
SHORT = "vit deit swin t5 mt5 phi2 phi3 bart bloom dbrx unet"
FAMILY = re.compile(rf"{LONG.replace(' ', '|')}|(?<![a-z])(?:{SHORT.replace(' ', '|')})(?![a-z])", re.IGNORECASE)
# Where private interfaces of torch may be used: one place for each stage that needs them.
COMPAT = {
    "trace/compat/torch_internals.py",
    "trace/compat/torch_recording.py",
    "trace/compat/export_shortcuts.py",
    "trace/compat/flex_attention.py",
    "trace/compat/foreign_kernels.py",
    "trace/compat/script_functions.py",
    "trace/compat/watching_tools.py",
    "lower/compat.py",
    "lower/compiler.py",
}


def test_no_source_names_a_model():
    assert {name: found for name, text in TEXTS.items() if (found := FAMILY.findall(text))} == {}


@pytest.mark.parametrize(
    "text", ["LlamaDecoderLayer", "model_type == 'gpt2'", "is_bert", "vit_base", "T5", "GPTNeoX", "x.unet"]
)
def test_a_model_name_is_seen(text: str):
    assert FAMILY.search(text)


@pytest.mark.parametrize(
    "text",
    ["NumberType", "MemberType", "invite", "activity", "embark", "swing", "philosophy", "blooming", "int5"],
)
def test_an_ordinary_word_is_no_model_name(text: str):
    assert not FAMILY.search(text)


def private_uses(source: str) -> list[str]:
    """What a source takes from torch under a name that begins with one underscore."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            found.append(ast.unparse(node))
    return sorted({name for name in found if re.match(r"torch\.(\w+\.)*_(?!_)\w+", name)})


def test_private_torch_is_used_in_compat_only():
    users = {name for name, text in TEXTS.items() if private_uses(text)}
    assert users <= COMPAT
    assert set(TEXTS) >= COMPAT


@pytest.mark.parametrize(
    "source",
    [
        "import torch._guards",
        "from torch.fx import _pytree",
        "torch._C._foo()",
        "from torch._inductor.ir import x",
    ],
)
def test_a_private_use_is_seen(source: str):
    assert private_uses(source) != []
    assert private_uses("from torch import nn\nx = torch.zeros(1).add_(1)\ntorch.__version__") == []


def modules_loaded_by(*statements: str) -> list[set[str]]:
    """What a new process has loaded behind each of `statements`, which it runs one after the other."""
    code = "\n".join(["import sys", *(f"{each}\nprint(' '.join(sys.modules))" for each in statements)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return [set(line.split()) for line in done.stdout.splitlines()]


PURE = (
    "autopar", "autopar.errors", "autopar.placement", "autopar.program", "autopar.cluster", "autopar.plan",
    "autopar.ops", "autopar.cost", "autopar.search",
)  # fmt: skip


def test_pure_parts_load_no_torch():
    for module, loaded in zip(PURE, modules_loaded_by(*(f"import {module}" for module in PURE)), strict=True):
        assert module in loaded
        assert "torch" not in loaded, module


@pytest.mark.slow
def test_public_names_load_on_first_use():
    assert {"Cluster", "Plan", "parallelize", "plan", "register_rule", "verify"} <= set(autopar.__all__)
    alone, plan, balance, pure, data = modules_loaded_by(
        "import autopar",
        "autopar.Plan",
        "autopar.balance.Lengths; autopar.errors.LengthError",
        "autopar.Cluster; autopar.register_rule",
        "autopar.data.EncoderRows",
    )
    assert "autopar.plan" in plan - alone
    assert "autopar.balance" in balance - plan
    assert "torch" not in pure
    assert "autopar.data" in data - pure
    assert "torch" in data  # where it is loaded that is seen


@pytest.mark.parametrize("name", autopar.__all__)
def test_every_public_name_can_be_called_also_when_a_module_has_the_same_name(name: str):
    import autopar.plan
    import autopar.verify

    for _ in range(2):
        found = getattr(autopar, name)
        assert callable(found)
        assert found.__name__ == name
    assert getattr(import_module("autopar"), name) is found


def test_an_unknown_name_is_refused_as_python_does():
    with pytest.raises(AttributeError, match="has no attribute 'paralelize'"):
        autopar.paralelize  # noqa: B018


def test_every_error_is_one_family_and_explains_itself():
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert issubclass(kind, errors.AutoparError)
        assert kind.__doc__
    defined = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert defined == set(errors.__all__)
