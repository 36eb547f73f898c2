"""Recipes of a matrix product: how its operands are scaled and cast, and the product itself.

All products are written as A B^T with A (M, K) and B (N, K), so that rows are scaled along K.

A scale is max(dtype) / amax of a tensor, a row or a block; operands are multiplied by it, clamped
and cast. Products of FP8 operands add up in fp32; on CUDA the result is rounded to bf16. Where a
library has no kernel, the product is that of the cast operands in fp32.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from training.precision.precision_map import RecipeName

Scaling = Literal["none", "tensor", "row", "block"]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK = 128  # of block-wise scales, along K
ALIGNMENT = 16  # K and N of FP8 kernels on CUDA; bf16 is several times slower without
MIN_AMAX = 1e-12


@dataclass(frozen=True)
class Recipe:
    """How the operands of a product are cast; gradients may have a dtype of their own."""

    scaling: Scaling
    dtype: torch.dtype
    gradient_dtype: torch.dtype

    @property
    def is_fp8(self) -> bool:
        """Whether operands are cast to FP8."""
        return self.scaling != "none"

    @property
    def is_emulated(self) -> bool:
        """Whether it is FP8 without a kernel on CUDA: products of blocks, or of two e5m2."""
        return self.scaling == "block" or self.dtype == E5M2


RECIPES: Mapping[RecipeName, Recipe] = {
    "fp32": Recipe("none", torch.float32, torch.float32),
    "bf16": Recipe("none", torch.bfloat16, torch.bfloat16),
    "fp8_tensor": Recipe("tensor", E4M3, E5M2),
    "fp8_tensor_e4m3": Recipe("tensor", E4M3, E4M3),
    "fp8_tensor_e5m2": Recipe("tensor", E5M2, E5M2),
    "fp8_row": Recipe("row", E4M3, E4M3),
    "fp8_row_e5m2": Recipe("row", E5M2, E5M2),
    "fp8_block": Recipe("block", E4M3, E4M3),
    "fp8_block_e5m2": Recipe("block", E5M2, E5M2),
}


@dataclass(frozen=True)
class ScaledOperand:
    """Cast values (M, K), and the factors that decode them: (1, 1), (M, 1) or (M, K / BLOCK)."""

    values: Tensor
    decode: Tensor

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values that the cast operand stands for (M, K)."""
        values, decode = self.values.to(dtype), self.decode.to(dtype)
        if decode.shape[1] > 1:
            decode = decode.repeat_interleave(BLOCK, 1)[:, : values.shape[1]]
        return values * decode


def quantize(x: Tensor, dtype: torch.dtype, scaling: Scaling) -> ScaledOperand:
    """An operand (M, K), scaled and cast to FP8."""
    largest = torch.finfo(dtype).max
    amax = _amax(x.detach().abs().float(), scaling).clamp(min=MIN_AMAX)
    decode = amax / largest
    scale = decode.reciprocal()
    if scale.shape[1] > 1:
        scale = scale.repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
    values = (x.float() * scale).clamp(-largest, largest).to(dtype)
    return ScaledOperand(values, decode)


@functools.cache
def _compiled_quantize() -> Callable[[Tensor, torch.dtype, Scaling], ScaledOperand]:
    return torch.compile(quantize, dynamic=True)


def _fused_quantize(x: Tensor, dtype: torch.dtype, scaling: Scaling) -> ScaledOperand:
    """`quantize` in two kernels: for the largest magnitudes, and for the casts."""
    return _compiled_quantize()(x, dtype, scaling)


def _amax(magnitudes: Tensor, scaling: Scaling) -> Tensor:
    if scaling == "tensor":
        return magnitudes.amax().reshape(1, 1)
    if scaling == "row":
        return magnitudes.amax(1, keepdim=True)
    blocks = F.pad(magnitudes, (0, -magnitudes.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    return torch.amax(blocks, 2)


def product(a: Tensor, b: Tensor, name: RecipeName, gradients: tuple[bool, bool]) -> Tensor:
    """A B^T (M, N) by a recipe, in the dtype of `a`; `gradients` says which of both is a gradient.

    Products of K = 0 or M = 0 are not cast. The recipe holds in regions with autocast, too.
    """
    with torch.autocast(a.device.type, enabled=False):
        return _product(a, b, name, gradients)


def _product(a: Tensor, b: Tensor, name: RecipeName, gradients: tuple[bool, bool]) -> Tensor:
    recipe = RECIPES[name]
    if not recipe.is_fp8 or not a.numel():
        if a.is_cuda and name == "bf16":
            a, b = (F.pad(x, (0, -x.shape[1] % ALIGNMENT)) for x in (a, b))
        return (a.to(recipe.dtype) @ b.to(recipe.dtype).t()).to(a.dtype)
    dtypes = [recipe.gradient_dtype if is_gradient else recipe.dtype for is_gradient in gradients]
    if a.is_cuda and not recipe.is_emulated:
        return _cuda_product(a, b, recipe, dtypes)
    quantized = [quantize(x, t, recipe.scaling) for x, t in zip((a, b), dtypes, strict=True)]
    return (quantized[0].dequantized() @ quantized[1].dequantized().t()).to(a.dtype)


def _cuda_product(a: Tensor, b: Tensor, recipe: Recipe, dtypes: list[torch.dtype]) -> Tensor:
    """A B^T by PyTorch's scaled product, with K and N padded to multiples of ALIGNMENT."""
    columns = b.shape[0]
    padding = 0, -a.shape[1] % ALIGNMENT
    a = F.pad(a, padding)
    b = F.pad(b, (*padding, 0, -columns % ALIGNMENT))
    left, right = (
        _fused_quantize(x, t, recipe.scaling) for x, t in zip((a, b), dtypes, strict=True)
    )
    result: Tensor = torch._scaled_mm(
        left.values,
        right.values.t(),
        scale_a=left.decode.contiguous(),
        scale_b=right.decode.t().contiguous(),
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )
    return result[:, :columns].contiguous().to(a.dtype)
