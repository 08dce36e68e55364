"""OpenTelemetry: a span for each request, and nothing that a collector or a client's headers could do to the server."""

from __future__ import annotations

import threading

import pytest

from niwaki.runtime.server.tracing import Tracing

pytest.importorskip("opentelemetry.sdk")  # niwaki[otel]


def test_traces_hold_a_span_for_each_request_in_the_trace_of_its_caller() -> None:
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracing = Tracing(SimpleSpanProcessor(exporter))
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    end = tracing.begin("POST", "/generate", {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"})
    end(503, "mine-9")
    (span,) = exporter.get_finished_spans()
    assert span.name == "POST /generate"
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == trace_id
    assert span.attributes is not None
    assert span.attributes["http.response.status_code"] == 503
    assert span.attributes["niwaki.request_id"] == "mine-9"
    tracing.close()


def test_no_end_waits_for_a_collector_and_what_clients_write_in_headers_is_in_no_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    answers, has_sent = threading.Event(), threading.Event()

    class Unanswered(SimpleSpanProcessor):
        def shutdown(self) -> None:
            answers.wait(60)
            has_sent.set()

    monkeypatch.setattr("niwaki.runtime.server.tracing.CLOSING_SECONDS", 0.01)
    tracing = Tracing(Unanswered(InMemorySpanExporter()))
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    for traceparent, tracestate in ((parent, "=canary"), ("canary" * 100, "a=b"), (parent, "canary," * 2000)):
        tracing.begin("GET", "/health", {"traceparent": traceparent, "tracestate": tracestate})(200, "1")
    tracing.close()
    assert not has_sent.is_set()
    answers.set()
    assert has_sent.wait(60)
    assert not caplog.messages
