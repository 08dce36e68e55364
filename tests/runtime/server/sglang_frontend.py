"""Runs SGLang's own frontend against a server: `python sglang_frontend.py FOLDER URL` prints what its programs gave.

FOLDER holds `sglang/lang`, `sglang/utils.py` and `sglang/srt/environ.py` of its wheel; no more is needed. The
package's own __init__ is passed over, as it patches libraries that a frontend does not use; four modules that
utils.py names and no call here reaches are empty.
"""

from __future__ import annotations

import importlib
import json
import sys
from types import ModuleType


def prepare(folder: str) -> None:
    for name in ("IPython", "aiohttp", "pybase64"):
        sys.modules[name] = ModuleType(name)
    display = ModuleType("IPython.display")
    vars(display).update(HTML=None, display=None)
    sys.modules["IPython.display"] = display
    for name in ("sglang", "sglang.srt"):
        package = ModuleType(name)
        package.__path__ = [f"{folder}/{name.replace('.', '/')}"]
        sys.modules[name] = package


def main(folder: str, url: str) -> None:
    prepare(folder)
    api = importlib.import_module("sglang.lang.api")
    endpoint = importlib.import_module("sglang.lang.backend.runtime_endpoint").RuntimeEndpoint(url)
    api.set_default_backend(endpoint)
    methods = importlib.import_module("sglang.lang.choices")

    def questions(s, animal):  # type: ignore[no-untyped-def]  # sglang has no types
        s += "the " + animal + " is "
        s += api.gen("text", max_tokens=48, temperature=0, ignore_eos=True)
        s += ". Number: " + api.gen("number", dtype=int, max_tokens=4, temperature=0)
        s += ". Code: " + api.gen("code", regex="[ab]{3}", max_tokens=5)
        s += ". It is " + api.select("size", choices=["small", "large"])
        forks = s.fork(2)
        for index, fork in enumerate(forks):
            fork += f" fork {index}: " + api.gen("more", max_tokens=3, temperature=0)
        s += "|".join(fork["more"] for fork in forks)
        s += " so " + api.gen("letters", max_tokens=40, ignore_eos=True, stop_regex="[a-z]")
        for method in ("greedy_token_selection", "unconditional_likelihood_normalized"):
            s += " is " + api.select(method, ["small", "large"], choices_method=getattr(methods, method))

    program = api.function(questions)
    state = program.run(animal="cat")
    info = state.get_meta_info("text")
    streamed = "".join(program.run(animal="cat", stream=True).text_iter("text"))
    batch = program.run_batch([{"animal": "dog"}, {"animal": "cow"}], num_threads=2)
    endpoint.flush_cache()
    said = {
        "model": endpoint.get_model_name(),
        "text": state["text"],
        "number": state["number"],
        "code": state["code"],
        "size": state["size"],
        "letters": state["letters"],
        "sizes": [state["greedy_token_selection"], state["unconditional_likelihood_normalized"]],
        "end": state.text().rpartition(" It is ")[2],
        "completion_tokens": info["completion_tokens"],
        "streamed": streamed,
        "batch": [one["size"] for one in batch],
        "kv_tokens": endpoint.get_server_info()["kv_tokens"],
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
