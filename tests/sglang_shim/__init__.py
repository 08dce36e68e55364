"""niwaki under SGLang's module names, so that programs written for it can be imported and run as they are.

For tests only. Nothing here translates anything: each name is niwaki's own object.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import niwaki
from niwaki.lang import patterns
from niwaki.lang.backends import Host
from niwaki.runtime.api import choices


@contextmanager
def installed(host: Host, model_name: str, get_tokenizer: Callable[[str], object]) -> Iterator[None]:
    """Within the block `import sglang` and the modules of it that programs name are niwaki, on `host`."""
    # `global_config.default_backend.endpoint` is how a program asks for the model's name.
    endpoint = SimpleNamespace(get_model_name=lambda: model_name)
    config = SimpleNamespace(default_backend=SimpleNamespace(endpoint=endpoint))
    modules = {
        "sglang": _module("sglang", {**_public(niwaki), "global_config": config}),
        "sglang.lang": _module("sglang.lang", {}),
        "sglang.lang.choices": _module("sglang.lang.choices", _public(choices)),
        "sglang.lang.ir": _module("sglang.lang.ir", _public(patterns)),
        "sglang.srt": _module("sglang.srt", {}),
        "sglang.srt.utils": _module("sglang.srt.utils", {"is_hip": lambda: False}),
        "sglang.srt.utils.hf_transformers_utils": _module(
            "sglang.srt.utils.hf_transformers_utils", {"get_tokenizer": get_tokenizer}
        ),
    }
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    niwaki.set_default_backend(host)
    try:
        yield
    finally:
        niwaki.set_default_backend(None)
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _public(module: ModuleType) -> dict[str, object]:
    names = getattr(module, "__all__", [name for name in dir(module) if not name.startswith("_")])
    return {name: getattr(module, name) for name in names}


def _module(name: str, contents: dict[str, object]) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = []  # a package, whose submodules stand in sys.modules
    vars(module).update(contents)
    return module
