"""niwaki: programs for language models, on a runtime of their own. Names only; each loads where it is first used."""

from __future__ import annotations

__version__ = "0.1.0"
