"""OpenTelemetry: a span for each request, where niwaki[otel] is installed and an endpoint was given; else nothing.

A span holds names, counts and times, never a prompt, an answer or a key.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from niwaki.runtime.api import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.trace import Span

SERVICE = "niwaki"
CLOSING_SECONDS = 1.0  # for the last spans: a collector that does not answer holds up no end


class Tracing:
    """Spans of one server. Without a processor it makes none, and loads nothing."""

    def __init__(self, processor: SpanProcessor | None = None) -> None:
        self._provider: TracerProvider | None = None
        if processor is not None:
            from opentelemetry.sdk.resources import Resource  # heavy, and an extra
            from opentelemetry.sdk.trace import TracerProvider

            # It warns of each header that it cannot read, and quotes it: what clients write belongs in no log.
            logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)
            resource = Resource.create({"service.name": SERVICE})
            self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
            self._provider.add_span_processor(processor)

    @classmethod
    def to(cls, endpoint: str | None) -> Tracing:
        """Traces to a collector's OTLP endpoint over HTTP, in the background; None: no traces.

        Raises:
            ConfigError: niwaki[otel] is not installed.
        """
        if endpoint is None:
            return cls()
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError as error:
            raise ConfigError(f"traces need {error.name}; install niwaki[otel]") from None
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint)))

    def begin(self, method: str, path: str, headers: Mapping[str, str]) -> Callable[[int, str], None]:
        """A request has arrived; call what this gives with its status and its request id when it is answered.

        A `traceparent` header makes the span a part of the caller's trace.
        """
        if self._provider is None:
            return _nothing
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        span: Span = self._provider.get_tracer(SERVICE).start_span(
            f"{method} {path}",
            context=TraceContextTextMapPropagator().extract(headers),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": method, "url.path": path},
        )

        def end(status: int, request_id: str) -> None:
            span.set_attribute("http.response.status_code", status)
            span.set_attribute("niwaki.request_id", request_id)
            if status >= 500:
                span.set_status(Status(StatusCode.ERROR))
            span.end()

        return end

    def close(self) -> None:
        """Send what was not sent yet, as far as that takes no longer than CLOSING_SECONDS."""
        if self._provider is not None:
            sending = threading.Thread(target=self._provider.shutdown, name="niwaki-spans", daemon=True)
            sending.start()
            sending.join(CLOSING_SECONDS)


def _nothing(status: int, request_id: str) -> None:
    pass
