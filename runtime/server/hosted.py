"""Where the model runs: in this process, in one of ours, or in replicas on Ray. Begun before the server's own imports,
as it takes longest."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from niwaki.runtime.link.engine_process import EngineProcess
from niwaki.runtime.link.remote_engine import RemoteEngine
from niwaki.runtime.replicas.engines import RayEngines
from niwaki.runtime.server.config import ServerConfig

if TYPE_CHECKING:
    from niwaki.runtime.engine import Engine  # loads torch, which the server's process does without

Hosted: TypeAlias = "Engine | RemoteEngine"


@contextmanager
def hosted(config: ServerConfig, model: Path | None, options: dict[str, object]) -> Iterator[Hosted]:
    """The model, loaded and warm, where `config` says; it ends with the block.

    Raises:
        ConfigError, ModelError: as `Engine`. EngineStopped: its process died while it loaded the model.
    """
    if config.in_process:
        from niwaki.runtime.engine import Engine  # loads torch
        from niwaki.runtime.link.engine_host import warm_up

        with Engine(model, **options) as engine:
            warm_up(engine)
            yield engine
    elif config.replicas is not None:
        with RayEngines(model, options, config.replicas) as engines:
            yield engines
    else:
        process = EngineProcess(model, options, max_restarts=config.max_restarts)
        process.launch()
        try:
            importlib.import_module("niwaki.runtime.server.serve")  # takes a second, in which the engine loads
        except BaseException:
            process.shutdown()
            raise
        with process:
            yield process
