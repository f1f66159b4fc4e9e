"""GET /metrics: JSON for people, Prometheus text and OpenMetrics for scrapers, the same numbers in all."""

from __future__ import annotations

import re

import pytest

from crucible.engine.messages import HistogramValues, MetricsReply
from crucible.server import prometheus
from tests.serving import ROOT, Running, eventually, serving

SCRAPER = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
SAMPLE = re.compile(rf'({NAME})(?:\{{le="([^"]+)"\}})? (-?[0-9.e+-]+|\+Inf|NaN)')


def parse(text: str) -> tuple[dict[str, str], dict[str, list[tuple[str, str | None, float]]]]:
    """(type by family, samples by family); every sample must follow its own family's HELP and TYPE."""
    types: dict[str, str] = {}
    samples: dict[str, list[tuple[str, str | None, float]]] = {}
    assert text.endswith("\n")
    lines = text.splitlines()
    family = ""
    for position, line in enumerate(lines):
        if line == "# EOF":
            assert position == len(lines) - 1
        elif line.startswith("# HELP "):
            family, words = line[7:].split(" ", 1)
            assert words
            assert family not in types, "a family comes once"
            assert lines[position + 1].startswith(f"# TYPE {family} ")
        elif line.startswith("# TYPE "):
            types[family] = line.split(" ")[3]
            samples[family] = []
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            assert match[1].startswith(family)
            samples[family].append((match[1], match[2], float(match[3])))
    return types, samples


def histogram_of(samples: list[tuple[str, str | None, float]], name: str) -> tuple[list[float], float, float]:
    """(cumulative buckets, sum, count) after their shape has been checked."""
    buckets = [(float(le), value) for sample, le, value in samples if sample == f"{name}_bucket" and le is not None]
    bounds, counts = [le for le, _ in buckets], [value for _, value in buckets]
    assert bounds == sorted(set(bounds))
    assert bounds[-1] == float("inf")
    assert counts == sorted(counts)
    (total,) = [value for sample, _, value in samples if sample == f"{name}_sum"]
    (count,) = [value for sample, _, value in samples if sample == f"{name}_count"]
    assert count == counts[-1]
    return counts, total, count


@pytest.mark.parametrize(
    ("query", "accept", "kind"),
    [
        ("", None, "application/json"),
        ("", "*/*", "application/json"),
        ("", "application/json, text/plain, */*", "application/json"),
        ("", "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", "application/json"),
        ("", "image/png", "application/json"),
        ("", "garbage;;q=x", "application/json"),
        ("", "text/plain", prometheus.TEXT),
        ("", "text/plain;version=0.0.4;q=0.5,*/*;q=0.1", prometheus.TEXT),
        ("", SCRAPER, prometheus.OPENMETRICS),
        ("?format=prometheus", None, prometheus.TEXT),
        ("?format=prometheus", "application/json", prometheus.TEXT),
        ("?format=openmetrics", None, prometheus.OPENMETRICS),
        ("?format=json", SCRAPER, "application/json"),
    ],
)
def test_the_format_is_negotiated(service: Running, query: str, accept: str | None, kind: str) -> None:
    headers = {} if accept is None else {"Accept": accept}
    for method in ("GET", "HEAD"):
        response = service.http.request(method, "/metrics" + query, headers=headers)
        assert response.status_code == 200
        assert response.headers["content-type"] == kind
        assert response.headers["cache-control"] == "no-store"


def test_an_unknown_format_is_refused(service: Running) -> None:
    response = service.get("/metrics?format=xml")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "format"


def test_text_and_json_say_the_same() -> None:
    with serving(core={"max_batch": 2}, http_workers=2) as running:
        for _ in range(3):
            assert running.post(prompt="abc", max_tokens=4).status_code == 200
        assert running.post(prompt="!refuse", max_tokens=4).status_code == 400
        values = running.metrics()
        for query, suffix in (("prometheus", "_total"), ("openmetrics", "")):
            text = running.get(f"/metrics?format={query}").text
            assert text.endswith("# EOF\n") == (query == "openmetrics")
            types, samples = parse(text)
            for key in ("completed_requests", "rejected_requests", "tokens_generated", "decode_steps"):
                family = f"crucible_{key}{suffix}"
                assert types[family] == "counter"
                assert samples[family] == [(f"crucible_{key}_total", None, values[key])]
            for key in ("active_requests", "queued_requests", "kv_pages_used", "kv_pages_total"):
                assert types[f"crucible_{key}"] == "gauge"
                assert samples[f"crucible_{key}"] == [(f"crucible_{key}", None, values[key])]
            assert {"crucible_uptime_seconds", "crucible_step_age_seconds"} <= set(types)
            counts = {}
            for key in prometheus.HISTOGRAMS:
                name = f"crucible_{key}"
                assert types[name] == "histogram"
                _, total, counts[key] = histogram_of(samples[name], name)
                assert total >= 0
            # Whichever worker answers: these requests went through both.
            assert counts == {
                "time_to_first_token_seconds": 3, "inter_token_latency_seconds": 9, "e2e_request_latency_seconds": 3,
                "queue_time_seconds": 3, "batch_size": 12,
            }


def test_the_text_of_a_report() -> None:
    histograms = {"batch_size": HistogramValues([1.0, 2.5], [1, 0, 2], 9.5)}
    report = MetricsReply(1, {"tokens_generated": 7, "batch_avg": 0.5, "new_number": 3}, histograms)
    text = prometheus.exposition(report, openmetrics=False)
    assert [line for line in text.splitlines() if not line.startswith("# HELP")] == [
        "# TYPE crucible_tokens_generated_total counter",
        "crucible_tokens_generated_total 7",
        "# TYPE crucible_batch_avg gauge",
        "crucible_batch_avg 0.5",
        "# TYPE crucible_new_number gauge",
        "crucible_new_number 3",
        "# TYPE crucible_batch_size histogram",
        'crucible_batch_size_bucket{le="1.0"} 1',
        'crucible_batch_size_bucket{le="2.5"} 1',
        'crucible_batch_size_bucket{le="+Inf"} 3',
        "crucible_batch_size_sum 9.5",
        "crucible_batch_size_count 3",
    ]


def test_every_number_of_an_engine_has_its_words() -> None:
    from crucible.config import EngineConfig
    from crucible.engine.core import EngineCore
    from tests.engine.toy import toy_config, toy_runner

    core = EngineCore(EngineConfig(context=64, kv_pages=8, max_batch=2), toy_config(), toy_runner(8))
    known = set(prometheus.GAUGES) | set(prometheus.COUNTERS)
    assert set(core.metrics()) <= known
    assert known - set(core.metrics()) == {"rejected_requests", "step_age_s"}
    documented = (ROOT / "docs" / "api.md").read_text()
    for name in (*known, *prometheus.HISTOGRAMS):
        assert f"`{name}`" in documented, name


def test_scrapes_of_a_busy_engine_do_not_wait_for_a_step() -> None:
    with serving(core={"step_s": 1.0}) as running, running.open_post("/v1/generate", prompt="a", max_tokens=900):
        eventually(lambda: running.metrics()["active_requests"] == 1)
        elapsed = [running.get("/metrics?format=prometheus").elapsed.total_seconds() for _ in range(5)]
        assert min(elapsed) < 0.1
