"""Kernels as a processor of fewer instructions gets them: in a process of its own, where LLVM is told of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import pytest

ROOT = str(Path(__file__).parents[2])

# LLVM ends the process where it is asked for an instruction that the processor has not.
SEEN_AS = """
import llvmlite.binding as llvm
import torch

found = llvm.get_host_cpu_features()
has = type(found)({{one: is_there and not one.startswith({lacks}) for one, is_there in found.items()}})
llvm.get_host_cpu_name = lambda: {name!r}
llvm.get_host_cpu_features = lambda: has
torch.cpu._is_amx_tile_supported = lambda: False
"""
AVX2_ALONE = SEEN_AS.format(name="haswell", lacks=("avx512", "avx10", "amx", "gfni", "vaes", "vpclmulqdq"))
AVX512_WITHOUT_PAIRS = SEEN_AS.format(name="skylake-avx512", lacks=("avx512bf16", "avx512fp16", "avx10", "amx"))

COMPILE = """
from numba import types
from niwaki.kernels.first_start import kernels
from niwaki.kernels.layers import work
from niwaki.kernels.vector_tiles import multiplies_pairs

assert not multiplies_pairs()
for kernel, signature in kernels():
    kernel.compile(signature)
work.compile((types.int64, types.int64[::1], types.uint16[::1]))
"""

EXTRACT = """
from examples.extract import extract
from niwaki.kernels.tiles import has_tiles

assert has_tiles()
contact = extract.run(text="Hi, I'm Lena Fischer, a nurse from Dresden. My email is lena@fischer.example.")["contact"]
print(contact.name, contact.role, contact.city, contact.email, sep="; ")
"""

features = llvm.get_host_cpu_features()
ANSWER = "Lena Fischer; nurse; Dresden; lena@fischer.example\n"


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": ROOT},
    )
    assert done.returncode == 0, done.stderr[-1000:]
    return done.stdout


@pytest.mark.skipif(not features.get("fma"), reason="this CPU has no fused products")
def test_a_program_runs_by_avx2_alone() -> None:
    assert run(AVX2_ALONE + COMPILE + EXTRACT) == ANSWER


@pytest.mark.skipif(not features.get("avx512dq"), reason="this CPU has no AVX-512")
def test_a_program_runs_by_avx512_without_products_of_pairs() -> None:
    assert run(AVX512_WITHOUT_PAIRS + COMPILE + EXTRACT) == ANSWER


@pytest.mark.skipif(not features.get("avx512dq"), reason="this CPU has no AVX-512")
def test_llvm_is_told_how_to_read_instructions_before_a_kernel_comes_from_the_disk() -> None:
    look = "from niwaki.kernels.simd import splits_numbers\nprint(splits_numbers.cache_info().currsize)"
    assert run(AVX512_WITHOUT_PAIRS + look) == "1\n"
