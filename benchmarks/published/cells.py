"""What the cells of a table say, however they are spelled."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

__all__ = [
    "Cells", "expert_counts", "has_nothing", "is_yes", "number", "precision_of", "recomputation_of", "sharding_of",
]  # fmt: skip

_NOTHING = {"", "-", "--", "?", "n/a", "na", "n.a.", "nan", "none", "null", "unknown", "not stated", "tbd"}
_YES = ("y", "yes", "true", "t", "1", "on", "enabled", "inductor", "torch.compile", "xla", "max-autotune")
_PLAIN = {0x2013: "-", 0x2014: "-", 0x2212: "-", 0x00D7: "x", 0x2248: "~", 0x00A0: " ", 0x202F: " "}  # dashes, spaces
_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}
_NUMBER = r"[-+]?(?:\d[\d,_ ]*\d|\d)?(?:\.\d+)?(?:e[-+]?\d+)?"


def has_nothing(text: str) -> bool:
    """Whether a cell is empty, or says that nobody knows."""
    return text.strip().lower() in _NOTHING


def number(text: str, thousand: float = 1000.0) -> float:
    """The number that a cell starts with, the middle of a range; with a k behind it times `thousand`.

    Raises:
        ValueError: it starts with none.
    """
    plain = re.sub(r"^\s*(?:~|about|ca\.?|>=?|<=?|x)\s*", "", text.strip().lower())
    pattern = rf"({_NUMBER})\s*([kmbg](?![a-z]))?(?:\s*(?:-|to|\.\.)\s*({_NUMBER})\s*([kmbg](?![a-z]))?)?"
    found = re.match(pattern, plain)
    if found is None or not re.search(r"\d", found[1]):
        raise ValueError(f"{text.strip()!r} is no number")
    scales = _SCALES | {"k": thousand}
    first, last = _digits(found[1]), _digits(found[3] or "")
    scale = scales[found[2] or found[4] or ""]
    if last is None or first is None:
        return (first or 0.0) * scale
    return (first * scale + last * scales[found[4] or found[2] or ""]) / 2


def _digits(text: str) -> float | None:
    plain = re.sub(r"[,_\s]", "", text)
    return float(plain) if re.search(r"\d", plain) else None


def is_yes(text: str) -> bool:
    """Whether a cell says yes; what follows the first word doesn't count."""
    words = re.findall(r"[a-z0-9.+-]+", text.strip().lower())
    return bool(words) and words[0] in _YES


def recomputation_of(text: str) -> str:
    """``"none"``, ``"full"``, or ``"selective"`` and what the cell says of it; ``""`` if it says nothing."""
    plain = text.strip().lower()
    if plain in ("none", "no", "n", "false", "off", "0", "disabled", "no ac", "without"):
        return "none"
    if has_nothing(plain):
        return ""
    if re.match(r"(no|none|off)\b", plain) and "not" not in plain:
        return "none"
    if re.search(r"save_nothing|nothing_saveable", plain):
        return "full"
    partly = r"selective|select|sac\b|per[ -]?op|op-level|save_|saveable|minimal|every|core|attn|attention|1/\d|dots"
    if plain.startswith("full") or not re.search(partly, plain):
        return "full"
    return plain if plain.startswith("selective") else f"selective ({plain})"


def sharding_of(text: str) -> str:
    """``"0"`` to ``"3"`` or ``"HSDP AxB"``, and what else the cell says."""
    plain = text.strip()
    low = plain.lower()
    if has_nothing(plain) or low in ("no", "n", "ddp", "dp", "no_shard", "false"):
        return "0"
    if re.match(r"\d", low) or re.match(r"HSDP \d+x\d+", plain):
        return plain
    if found := re.search(r"(?:hsdp|hybrid\w*)\D*(\d+)\s*[x*]\s*(\d+)", low):
        return f"HSDP {found[1]}x{found[2]}"
    if found := re.search(r"(?:zero|stage|sharding)\D{0,8}([0-3])", low):
        return f"{found[1]} ({plain})"
    if re.search(r"hsdp|hybrid_shard", low):
        return f"HSDP ({plain})"
    if "grad_op" in low:
        return f"2 ({plain})"
    if re.search(r"fsdp|full_shard|fully", low):
        return f"3 ({plain})"
    if re.search(r"distributed[ _-](opt|fused)|sharded opt|zero", low):
        return f"1 ({plain})"
    return "0"


def precision_of(text: str) -> str:
    """What products compute in: ``"float32"``, ``"float16"``, ``"bfloat16"`` (with it 8 bits, too); "" if unsaid."""
    low = text.lower()
    if re.search(r"bf16|bfloat|fp8|float8|mxfp|fp4|float4|hybrid|e4m3|e5m2", low):
        return "bfloat16"
    if re.search(r"fp16|float16|half|amp|mixed", low):
        return "float16"
    return "float32" if re.search(r"fp32|float32|single|tf32", low) else ""


def expert_counts(text: str) -> tuple[int, int]:
    """How many experts each token takes, of how many, where the text says both; (1, 1) otherwise."""
    low = text.lower()
    for pattern in (
        r"top[- ]?(?P<taken>\d+) (?:of|out of|from|/) ?(?P<all>\d+)",
        r"top[- ]?(?P<taken>\d+)\D{0,25}?(?P<all>\d+) experts",
        r"(?P<all>\d+) experts\D{0,25}?top[- ]?(?P<taken>\d+)",
        r"(?P<taken>\d+) (?:active |of |out of )+(?P<all>\d+) experts",
        r"(?P<all>\d+) experts\D{0,10}?(?P<taken>\d+) active",
    ):
        if found := re.search(pattern, low):
            return int(found["taken"]), int(found["all"])
    return 1, 1


class Cells:
    """One row: its cells by name, and what had to be assumed about it."""

    def __init__(self, row: Mapping[str, str]) -> None:
        """Keep the cells; a missing column is an empty cell."""
        self._row = row
        self.assumed: list[str] = []

    def text(self, name: str) -> str:
        """What a cell says; "" if there is none."""
        return self._row.get(name, "").translate(_PLAIN).strip()

    def number(self, name: str, default: Callable[[], tuple[float, str]] | float | None = None) -> float:
        """A number.

        Args:
            name: of the column.
            default: where the cell says nothing: what is usual then, or a function that also says what that assumes.

        Raises:
            ValueError: the cell holds no number, or nothing and there is no default.
        """
        text = self.text(name)
        if has_nothing(text) and default is not None:
            if not callable(default):
                return default
            value, assumption = default()
            self.assumed.append(assumption)
            return value
        try:
            return number(text, 1024.0 if name == "seq_len" else 1000.0)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    def whole(self, name: str, default: Callable[[], tuple[float, str]] | float | None = None) -> int:
        """A number of things, at least 1 (0 stays 0 without a default)."""
        value = self.number(name, default)
        if value != value or value < 0 or value > 1e12:
            raise ValueError(f"{name}: {self.text(name)!r} is no number of things")
        return max(1, round(value)) if default is not None else round(value)
