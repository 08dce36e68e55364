"""Llama 2, 3, 3.1, 3.2 (text) and 3.3, and the many models that use its architecture as it is."""

from __future__ import annotations

from niwaki.runtime.models.config import Family

LLAMA = Family(read=lambda raw, llama: llama)
