"""The pages on options list each of them as the command line, or the class that holds it, has it; and the page on sizes
what the models' shapes give."""

from __future__ import annotations

import argparse
import inspect
import re
import shutil
from contextlib import nullcontext
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import pytest

from niwaki.__main__ import add_serve_options, main
from niwaki.runtime import bundled
from niwaki.runtime.api import ConfigError, SamplingParams
from niwaki.runtime.api.sampling import FLOAT_BOUNDS, INT_BOUNDS
from niwaki.runtime.checkpoint.loader import read_model_folder
from niwaki.runtime.models.config import ModelConfig
from niwaki.runtime.options.config import EngineConfig
from niwaki.runtime.replicas.config import ReplicaConfig
from niwaki.runtime.server.cache_secret import kept_secret
from niwaki.runtime.server.config import ServerConfig
from niwaki.runtime.server.keys import KeyLimits, digest_of
from niwaki.runtime.server.options import SESSIONS
from niwaki.runtime.server.other_servers import (
    INSTEAD,
    ChatFieldsOfOthers,
    FieldsOfOthers,
    GenerateFieldsOfOthers,
    StructuredOutputs,
)
from tests.runtime.server.test_operations import make_certificate

DOCS = Path(__file__).parents[3] / "docs"
PAGE, FIELDS = DOCS / "operation.md", DOCS / "server-fields.md"
BEGIN, END = "<!-- options: made from the command line -->\n", "<!-- end of options -->\n"


def table() -> str:
    parser = argparse.ArgumentParser()
    add_serve_options(parser)
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        name = " ".join(filter(None, (action.option_strings[0], _value(action))))
        default = "" if action.default in (None, [], False) else f"`{action.default}`"
        about = (action.help or "").replace(" (%(default)s)", "")
        rows.append(f"| `{name}` | {default} | {about} |")
    return "\n".join(rows) + "\n"


def _value(action: argparse.Action) -> str:
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return str(action.metavar or "")


def test_the_options_page_is_the_command_lines_own() -> None:
    text = PAGE.read_text("utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0] == table(), f"docs/operation.md should have:\n{table()}"


def test_the_table_of_other_servers_fields_has_each_of_them() -> None:
    page = FIELDS.read_text("utf-8")
    kinds = (FieldsOfOthers, ChatFieldsOfOthers, GenerateFieldsOfOthers, StructuredOutputs)
    fields = {info.alias or name for kind in kinds for name, info in kind.model_fields.items()}
    named = set(re.findall(r"[a-z_]{3,}", page))
    assert not fields - named
    assert INSTEAD.keys() <= fields, "what is refused is a field of one of the pages"


def options_of(kind: type[Any]) -> str:
    """The fields of a class of options, each with what the comment behind it says."""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    source = inspect.getsource(kind)
    for field in fields(kind):
        found = re.search(rf"^    {field.name}: .*?  # (.+)$", source, re.MULTILINE)
        assert found is not None, f"{kind.__name__}.{field.name} has no comment that says what it is"
        rows.append(f"| `{field.name}` | `{_default(field)}` | {found[1].replace('|', chr(92) + '|')} |")
    return "\n".join(rows) + "\n"


def test_the_table_of_sampling_options_is_their_classes_own() -> None:
    """With the bounds that `resolve` holds them to."""
    rows = ["| option | default | bounds | meaning |", "|---|---|---|---|"]
    for row, field in zip(options_of(SamplingParams).splitlines()[2:], fields(SamplingParams), strict=True):
        low, high = (INT_BOUNDS | FLOAT_BOUNDS).get(field.name, ("", ""))
        name, default, meaning = row.strip("| ").split(" | ")
        bounds = f"{low:,} to {high:,}" if isinstance(low, float | int) and isinstance(high, float | int) else ""
        rows.append(f"| {name} | {default} | {bounds} | {meaning} |")
    table = "\n".join(rows) + "\n"
    text = (DOCS / "options.md").read_text("utf-8")
    told = text.partition("<!-- SamplingParams -->\n")[2].partition("<!-- end of SamplingParams -->\n")[0]
    assert told == table, f"it should be:\n{table}"


def _default(field: Field[Any]) -> str:
    return repr(field.default if field.default_factory is MISSING else field.default_factory())


@pytest.mark.parametrize("kind", [EngineConfig, ServerConfig, KeyLimits, ReplicaConfig])
def test_the_page_of_options_is_the_configs_own(kind: type[Any]) -> None:
    begin, end = f"<!-- {kind.__name__} -->\n", f"<!-- end of {kind.__name__} -->\n"
    text = (DOCS / "options.md").read_text("utf-8")
    assert text.partition(begin)[2].partition(end)[0] == options_of(kind), f"it should be:\n{options_of(kind)}"


def shaped(layers: int, kv_heads: int, head_dim: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=1000, num_layers=layers, hidden_size=1024, intermediate_size=1024, num_heads=kv_heads,
        num_kv_heads=kv_heads, head_dim=head_dim, context_length=1024, dtype="bfloat16",
    )  # fmt: skip


SIZED = {
    "niwaki-tiny": read_model_folder(Path(bundled.MODEL_DIR)).config,
    "Qwen2.5 0.5B": shaped(24, 2, 64),
    "Llama 3.2 1B": shaped(16, 8, 64),
    "Llama 3.2 3B": shaped(28, 8, 128),
    "Llama 3.1 8B": shaped(32, 8, 128),
}


def sizes() -> str:
    rows = []
    for name, config in SIZED.items():
        shape = f"{config.num_layers} x {config.num_kv_heads} x {config.head_dim}"
        plain, small = (config.kv_bytes_per_token("bfloat16", kind) for kind in ("auto", "int8"))
        rows.append(f"| {name} | {shape} | {plain:,} | {small:,} | {plain * 65_536 / 2**30:.2f} GiB |")
    return "\n".join(rows) + "\n"


def test_the_page_of_sizes_says_what_the_shapes_give() -> None:
    text = (DOCS / "sizing.md").read_text("utf-8")
    table = text.partition("<!-- models: made from their shapes -->\n")[2].partition("<!-- end of models -->\n")[0]
    assert table.partition("|---|---|---|---|---|\n")[2] == sizes(), f"it should be:\n{sizes()}"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_every_option_of_the_command_line_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once, each at another value than its default: what is served, and how, has all of them."""
    keys, cert, key, pages = (tmp_path / name for name in ("keys", "cert.pem", "key.pem", "pages"))
    keys.write_text("another-good-key concurrent=9\n")
    make_certificate(cert, key)
    said = {
        "--model": str(tmp_path), "--weights": "int8", "--kv-dtype": "fp8", "--kv-tokens": "4096",
        "--max-running-requests": "7", "--chunked-prefill-size": "96", "--streaming-prefill-size": "48",
        "--host-cache-bytes": "11", "--disk-cache-dir": str(pages), "--disk-cache-bytes": "13",
        "--deterministic": None, "--model-name": "ours", "--host": "0.0.0.0", "--port": "0",
        "--metrics-port": "8", "--tls-cert": str(cert), "--tls-key": str(key),
        "--api-key": "a-good-key", "--api-key-file": str(keys), "--admin-key": "the-admin-key",
        "--requests-per-minute": "3", "--tokens-per-minute": "5", "--concurrent": "2", "--allowed-host": "our.example",
        "--cors-origin": "https://our.example", "--max-queued": "17", "--drain-seconds": "1.5", "--max-restarts": "1",
        "--replicas": "2-3", "--replica-requests": "4", "--replica-cpus": "0.5", "--replica-gpus": "0.25",
        "--ray-address": "auto", "--sessions": "sqlite:///here.db", "--session-seconds": "60", "--log-level": "info",
        "--incremental-streaming-output": None, "--log-format": "json", "--otlp-endpoint": "http://collector:4318/v1/traces",
    }  # fmt: skip
    apart = {"--program", "--in-process"}  # a file of its own; not with replicas
    assert said.keys() | apart == {row.split("`")[1].split()[0] for row in table().splitlines()[2:]}
    words = [word for name, value in said.items() for word in ((name,) if value is None else (name, value))]
    found: dict[str, object] = {}

    def stop(config: ServerConfig, model: Path | None, options: dict[str, object]) -> None:
        found.update(config=config, model=model, options=options)
        raise ConfigError("far enough")

    monkeypatch.setattr("niwaki.__main__.check_folder", lambda path: None)
    monkeypatch.setattr("niwaki.runtime.server.hosted.hosted", stop)
    monkeypatch.setattr("niwaki.runtime.server.listen.bound", lambda config: nullcontext((config, [])))
    monkeypatch.setattr("niwaki.__main__.configured", lambda *how: nullcontext(found.update(logs=how)))
    assert main(["serve", *words]) == 1
    limits = KeyLimits(3, 5, 2)
    first, second = digest_of("a-good-key"), digest_of("another-good-key")
    assert found == {
        "config": ServerConfig(
            host="0.0.0.0", port=0, key_digests=(first, second), admin_digest=digest_of("the-admin-key"), limits=limits,
            key_limits=((first, limits), (second, KeyLimits(3, 5, 9))), allowed_hosts=("our.example",),
            cors_origins=("https://our.example",), tls_cert=cert, tls_key=key, max_queued=17, drain_seconds=1.5,
            metrics_port=8, max_restarts=1, replicas=ReplicaConfig(2, 3, 4, cpus=0.5, gpus=0.25, address="auto"),
            sessions="sqlite:///here.db", session_seconds=60.0, otlp_endpoint="http://collector:4318/v1/traces",
            cache_secret=kept_secret(pages), model_names=("ours",), incremental_streaming_output=True,
        ),
        "model": tmp_path,
        "options": {
            "weights": "int8", "kv_dtype": "fp8", "kv_tokens": 4096, "max_running_requests": 7,
                "chunked_prefill_size": 96, "streaming_prefill_size": 48, "host_cache_bytes": 11,
            "disk_cache_dir": str(pages), "disk_cache_bytes": 13, "deterministic": True,
        },
        "logs": ("info", "json"),
    }  # fmt: skip
    assert main(["serve", "--in-process", "--port", "0"]) == 1
    assert found["config"] == ServerConfig(port=0, in_process=True, sessions=SESSIONS)
