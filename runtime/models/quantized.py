"""Checkpoints whose weights are stored in fewer bits: which tensors stand in place of a weight, and what they mean.

A scheme reads a weight's parts as codes (kernels/coded.py), which products may keep as they are. Activations are never
quantised, so a W8A8 checkpoint is computed a little more exactly than it asks for. Knows names and numbers, no files.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from niwaki.kernels.coded import Coded
from niwaki.kernels.ops import Weight
from niwaki.runtime.api import ModelError
from niwaki.runtime.models.fields import Fields, flag, text, whole

Shape = tuple[int, ...]
Block = tuple[int, int]  # outputs and inputs that share a scale; 0: all
Parts = Mapping[str, torch.Tensor]  # by suffix


LEAST_SPAN, LARGEST_SPAN = 32, 128  # inputs to a multiple of which a kernel fills up
SCALE_BYTES, ZERO_BYTES = 4, 2


def bytes_in_codes(
    shape: Shape, bits: int, group: int, *, scale_bytes: int = SCALE_BYTES, zero_bytes: int = ZERO_BYTES
) -> int | None:
    """At most, as products keep them in memory (kernels/coded.py, kernels/triton/coded.py); None where these take no
    such groups, so that weights are put together. group: inputs that share a scale; 0 or less for all."""
    outputs, inputs = shape
    group = group if group > 0 else inputs
    span = LARGEST_SPAN if group >= inputs else min(group & -group, LARGEST_SPAN)
    if span < LEAST_SPAN:
        return None
    filled, groups = -(-inputs // span) * span, -(-inputs // group)
    return outputs * (filled * bits // 8 + groups * (scale_bytes + zero_bytes))


class Scheme(Protocol):
    """How a checkpoint stores weights."""

    def parts(self, name: str, shape: Shape, found: Container[str]) -> Mapping[str, Shape | None] | None:
        """The tensors of the checkpoint (`found`) that stand for the weight `name`, with their shapes (None: any), by
        what is added to `stem(name)`. None: the weight stands for itself."""
        ...

    def weight(self, parts: Parts, shape: Shape) -> Weight:
        """Of this shape: codes, or float32 where groups do not follow one another. A stack [experts, inputs, outputs]
        becomes codes [experts, outputs, inputs]."""
        ...

    def num_bytes(self, shape: Shape, parts: Container[str]) -> int | None:
        """`bytes_in_codes` of what `weight` gives; None where it gives none. Where `parts` does not tell, config.json
        does."""
        ...


def stem(name: str) -> str:
    """What the names of a weight's parts begin with."""
    return name.removesuffix("weight")


def read_scheme(raw: Fields) -> Scheme | None:
    """The scheme of config.json's `quantization_config`; None where there is none.

    Raises:
        ModelError: an unsupported one, naming those supported.
    """
    found = raw.get("quantization_config")
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else found
    if not isinstance(found, dict) or not isinstance(method, str) or method not in READERS:
        raise ModelError(f"quantization {method!r} is not supported; supported: {', '.join(READERS)}")
    return READERS[method](found)


# ---------------------------------------------------------------------------------------------------------------
# Whole numbers in 32-bit words, lowest bits first
# ---------------------------------------------------------------------------------------------------------------


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """[rows, words] int32 -> [rows, words x 32 / bits] int32, from 0 to 2^bits - 1."""
    if words.dtype != torch.int32:
        raise ModelError(f"packed weights must be stored as I32, got {words.dtype}")
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    numbers: torch.Tensor = (words[..., None] >> shifts) & (2**bits - 1)
    return numbers.flatten(-2)


def by_output(values: torch.Tensor, shape: Shape, block: Block) -> torch.Tensor:
    """A number for each block of a weight -> [outputs, groups of inputs]."""
    rows, columns = (size or side for size, side in zip(block, shape, strict=True))
    wanted = (-(-shape[0] // rows), -(-shape[1] // columns))
    of_blocks = values if values.ndim == 2 else values.reshape(-1, 1)
    if of_blocks.shape != wanted:
        raise ModelError(f"scales of {list(values.shape)} for a weight of {list(shape)}, expected {list(wanted)}")
    return of_blocks.repeat_interleave(rows, 0)[: shape[0]]


def coded(numbers: torch.Tensor, zeros: torch.Tensor | None, scales: torch.Tensor, group: int, bits: int) -> Coded:
    """numbers and zeros from 0 to 2^bits - 1, or a zero of 2^bits. group: 0 or less for all inputs."""
    if bits == 8:  # what there is to subtract is mostly 128, and then nothing
        numbers, zeros = numbers - 128, None if zeros is None else zeros - 128
    whole = None if zeros is None else zeros.to(torch.int16)
    codes = numbers.to(torch.int8).contiguous()  # kernels read them by rows, also once they are put together
    return Coded(codes, scales.float(), whole, group if group > 0 else numbers.shape[1], bits)


@dataclass(frozen=True, slots=True)
class Gptq:
    """Frantar et al., arXiv 2210.17323, as AutoGPTQ stores it: words run along the inputs; zero points along the
    outputs, less 1 in the first version; inputs may be sorted, `g_idx` then tells the group of each."""

    bits: int
    group: int
    zero_offset: int
    is_sorted: bool = False

    def parts(self, name: str, shape: Shape, found: Container[str]) -> Mapping[str, Shape | None] | None:
        if len(shape) != 2 or stem(name) + "qweight" not in found:
            return None
        outputs, inputs = shape
        groups = -(-inputs // self.group) if self.group > 0 else 1
        parts: dict[str, Shape | None] = {
            "qweight": (inputs * self.bits // 32, outputs),
            "qzeros": (groups, outputs * self.bits // 32),
            "scales": (groups, outputs),
        }
        if stem(name) + "g_idx" in found:
            parts["g_idx"] = (inputs,)
        return parts

    def weight(self, parts: Parts, shape: Shape) -> Weight:
        numbers = unpacked(parts["qweight"].t().contiguous(), self.bits)
        zeros = unpacked(parts["qzeros"], self.bits).t() + self.zero_offset
        weight = coded(numbers, zeros, parts["scales"].t(), self.group, self.bits)
        group_of = parts.get("g_idx")
        if group_of is None:
            return weight
        if int(group_of.min()) < 0 or int(group_of.max()) >= weight.scales.shape[1]:
            raise ModelError(f"g_idx names a group beyond the {weight.scales.shape[1]} that there are")
        in_order = torch.arange(shape[1], device=group_of.device) // weight.group
        return weight if torch.equal(group_of.long(), in_order) else weight.matrix(group_of.long())

    def num_bytes(self, shape: Shape, parts: Container[str]) -> int | None:
        return None if self.is_sorted else bytes_in_codes(shape, self.bits, self.group)


@dataclass(frozen=True, slots=True)
class Awq:
    """Lin et al., arXiv 2306.00978, in AutoAWQ's "gemm" layout: 4 bits, words along the outputs, in each of which they
    stand in the order ORDER."""

    group: int

    def parts(self, name: str, shape: Shape, found: Container[str]) -> Mapping[str, Shape | None] | None:
        if len(shape) != 2 or stem(name) + "qweight" not in found:
            return None
        outputs, inputs = shape
        groups = -(-inputs // self.group) if self.group > 0 else 1
        return {"qweight": (inputs, outputs // 8), "qzeros": (groups, outputs // 8), "scales": (groups, outputs)}

    def weight(self, parts: Parts, shape: Shape) -> Weight:
        numbers, zeros = (self._in_order(parts[name]).t() for name in ("qweight", "qzeros"))
        return coded(numbers, zeros, parts["scales"].t(), self.group, 4)

    def num_bytes(self, shape: Shape, parts: Container[str]) -> int | None:
        return bytes_in_codes(shape, 4, self.group)

    def _in_order(self, words: torch.Tensor) -> torch.Tensor:
        stored = unpacked(words, 4).view(len(words), -1, 8)
        ordered = torch.empty_like(stored)
        ordered[..., list(ORDER)] = stored
        return ordered.flatten(1)


ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class Packed:
    """compressed-tensors' "pack-quantized": whole numbers from -2^(bits - 1) on, words along the inputs; a scale, and
    perhaps a zero point, for each group of inputs."""

    bits: int
    block: Block

    def parts(self, name: str, shape: Shape, found: Container[str]) -> Mapping[str, Shape | None] | None:
        base = stem(name)
        if len(shape) != 2 or base + "weight_packed" not in found:
            return None
        parts: dict[str, Shape | None] = {
            "weight_packed": (shape[0], -(-shape[1] * self.bits // 32)),
            "weight_scale": None,
            "weight_shape": (2,),
        }
        optional: dict[str, Shape | None] = {"weight_zero_point": None, "weight_g_idx": (shape[1],)}
        return parts | {suffix: its for suffix, its in optional.items() if base + suffix in found}

    def weight(self, parts: Parts, shape: Shape) -> Weight:
        numbers = unpacked(parts["weight_packed"], self.bits)[:, : shape[1]]
        group_of = parts.get("weight_g_idx")
        block = self.block if group_of is None else (1, -(-shape[1] // parts["weight_scale"].shape[-1]))
        scales = by_output(parts["weight_scale"], shape, block)
        zeros = torch.full_like(scales, 2 ** (self.bits - 1))
        if "weight_zero_point" in parts:
            stored = unpacked(parts["weight_zero_point"].t().contiguous(), self.bits)
            zeros = by_output(stored[:, : shape[0]].t(), shape, block)
        weight = coded(numbers, zeros, scales, block[1], self.bits)
        return weight if group_of is None else weight.matrix(group_of.long())

    def num_bytes(self, shape: Shape, parts: Container[str]) -> int | None:
        return None if "weight_g_idx" in parts else bytes_in_codes(shape, self.bits, self.block[1])


@dataclass(frozen=True, slots=True)
class Scaled:
    """A number of 8 bits for each element, whole or e4m3, and a scale: for all, for each output, for each group of
    inputs, or for each block. What is there for activations is passed over."""

    scale: str  # the suffix of its tensor
    block: Block

    def parts(self, name: str, shape: Shape, found: Container[str]) -> Mapping[str, Shape | None] | None:
        base = stem(name)
        if len(shape) != 2 or base + self.scale not in found:
            return None
        optional = ("weight_zero_point", "input_scale", "input_zero_point", "activation_scale")
        return {"weight": shape, self.scale: None} | {one: None for one in optional if base + one in found}

    def weight(self, parts: Parts, shape: Shape) -> Weight:
        if parts["weight"].dtype not in (torch.int8, torch.float8_e4m3fn):
            raise ModelError(f"weights with scales must be stored as I8 or F8_E4M3, got {parts['weight'].dtype}")
        scales = by_output(parts[self.scale], shape, self.block).float()
        zeros = None
        if "weight_zero_point" in parts:
            zeros = by_output(parts["weight_zero_point"], shape, self.block).to(torch.int16)
        return Coded(parts["weight"], scales, zeros, self.block[1] or shape[1], 8)

    def num_bytes(self, shape: Shape, parts: Container[str]) -> int | None:
        return bytes_in_codes(shape, 8, self.block[1])


MX_GROUP = 32


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """The experts of GPT-OSS in the OCP's MXFP4: e2m1 numbers, two a byte, the lower half first, and for each 32 of
    them a power of two, stored plus 127. Stacked as [experts, outputs, inputs]."""

    def parts(self, name: str, shape: Shape, found: Container[str]) -> Mapping[str, Shape | None] | None:
        if len(shape) != 3 or name + "_blocks" not in found:
            return None
        experts, inputs, outputs = shape
        return {"_blocks": (experts, outputs, inputs // 32, 16), "_scales": (experts, outputs, inputs // 32)}

    def weight(self, parts: Parts, shape: Shape) -> Weight:
        blocks, scales = parts["_blocks"], parts["_scales"]
        if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
            raise ModelError(f"MXFP4 is stored as U8, got {blocks.dtype} and {scales.dtype}")
        codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(2)
        powers = (scales.int() << 23).view(torch.float32)  # but for 2^-127, which becomes 0
        return Coded(codes, powers, None, MX_GROUP, 4)

    def num_bytes(self, shape: Shape, parts: Container[str]) -> int | None:
        experts, inputs, outputs = shape
        filled = -(-inputs // (2 * MX_GROUP)) * 2 * MX_GROUP
        return bytes_in_codes((experts * outputs, filled), 4, MX_GROUP, scale_bytes=1, zero_bytes=0)


# ---------------------------------------------------------------------------------------------------------------
# config.json
# ---------------------------------------------------------------------------------------------------------------


def _gptq(raw: Fields) -> Scheme:
    bits, layout = _bits(raw, "bits", (4, 8)), text(raw, "checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise ModelError(f"GPTQ checkpoint_format {layout!r} is not supported; supported: gptq, gptq_v2")
    return Gptq(bits, _group(raw), 1 if layout == "gptq" else 0, flag(raw, "desc_act"))


def _awq(raw: Fields) -> Scheme:
    _bits(raw, "bits", (4,))
    if (version := text(raw, "version", "gemm").lower()) != "gemm":
        raise ModelError(f"AWQ version {version!r} is not supported; supported: gemm")
    if not flag(raw, "zero_point", True):
        raise ModelError("AWQ without zero points is not supported")
    return Awq(_group(raw))


def _compressed(raw: Fields) -> Scheme:
    groups = raw.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise ModelError(f"compressed-tensors: one of config_groups is supported, got {str(groups)[:100]}")
    (group,) = groups.values()
    rule = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(rule, dict):
        raise ModelError(f"compressed-tensors: weights must be an object, got {rule!r}")
    match text(raw, "format", ""):
        case "pack-quantized":
            return Packed(_bits(rule, "num_bits", (4, 8)), _block(rule))
        case "int-quantized" | "float-quantized" | "naive-quantized":
            _bits(rule, "num_bits", (8,))
            return Scaled("weight_scale", _block(rule))
        case other:
            raise ModelError(
                f"compressed-tensors format {other!r} is not supported; "
                "supported: pack-quantized, int-quantized, float-quantized, naive-quantized"
            )


def _fp8(raw: Fields) -> Scheme:
    """DeepSeek V3 has a scale for each block, Ministral 3, which says null, one for all."""
    is_whole = raw.get("weight_block_size", "") is None
    return Scaled("weight_scale_inv", (0, 0) if is_whole else _sides(raw, "weight_block_size"))


def _block(rule: Fields) -> Block:
    match text(rule, "strategy", "tensor"):
        case "tensor":
            return (0, 0)
        case "channel":
            return (1, 0)
        case "group":
            return (1, whole(rule, "group_size"))
        case "block":
            return _sides(rule, "block_structure")
        case other:
            raise ModelError(f"strategy {other!r} is not supported; supported: tensor, channel, group, block")


def _sides(raw: Fields, name: str) -> Block:
    match raw.get(name, [128, 128]):
        case [int(outputs), int(inputs)] if outputs > 0 and inputs > 0:
            return (outputs, inputs)
        case other:
            raise ModelError(f"{name} must be two whole numbers above 0, got {other!r}")


def _bits(raw: Fields, name: str, supported: tuple[int, ...]) -> int:
    if (bits := whole(raw, name)) not in supported:
        raise ModelError(f"{name} must be {' or '.join(map(str, supported))}, got {bits}")
    return bits


def _group(raw: Fields) -> int:
    """Inputs that share a scale; -1: all."""
    return -1 if raw.get("group_size") == -1 else whole(raw, "group_size", 128)


READERS: dict[str, Callable[[Fields], Scheme]] = {
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "gptq": _gptq,
    "mxfp4": lambda raw: Mxfp4(),
}
