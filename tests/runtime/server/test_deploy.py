"""What stands in deploy/: well-formed, and of one mind with the server's options and metrics. It is not run here."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from niwaki.runtime.server.metrics import Metrics
from niwaki.runtime.server.options import add_options

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
YAML_FILES = sorted(DEPLOY.rglob("*.yaml"))
INSTRUCTIONS = "FROM RUN COPY WORKDIR ENV USER EXPOSE VOLUME STOPSIGNAL HEALTHCHECK ENTRYPOINT".split()


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text("utf-8")))


def options_in(arguments: list[str]) -> argparse.Namespace:
    """As `niwaki serve` reads them."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser)
    return parser.parse_args(arguments)


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text("utf-8"))
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]


def entry_point() -> list[str]:
    (command,) = [rest for name, rest in instructions() if name == "ENTRYPOINT"]
    words = json.loads(command)
    assert words[:2] == ["niwaki", "serve"]
    return [str(word) for word in words[2:]]


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_every_yaml_file_parses(path: Path) -> None:
    assert all(isinstance(document, dict) for document in documents(path))


@pytest.mark.parametrize("path", sorted((DEPLOY / "kubernetes").glob("*.yaml")), ids=lambda path: path.name)
def test_the_manifests_are_what_kubernetes_takes(path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for document in documents(path):
        validate.validate(document, "1.34", strict=True)


def test_the_deployment_probes_pages_of_ours_and_scales_what_exists() -> None:
    service, deployment, budget = documents(DEPLOY / "kubernetes" / "niwaki.yaml")
    (scaler,) = documents(DEPLOY / "kubernetes" / "autoscaling.yaml")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    paths = {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert paths == {"/health", "/ready"}
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    for selector in (service["spec"]["selector"], budget["spec"]["selector"]["matchLabels"]):
        assert selector.items() <= labels.items()
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert "replicas" not in deployment["spec"], "applied again, it would end pods that the autoscaler has started"
    options = options_in([*entry_point(), *container["args"]])
    grace = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > options.drain_seconds + container["lifecycle"]["preStop"]["sleep"]["seconds"]
    metadata = deployment["spec"]["template"]["metadata"]
    assert metadata["annotations"]["prometheus.io/path"] == "/metrics"
    assert metadata["annotations"]["prometheus.io/port"] == str(options.metrics_port)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": options.port, "metrics": options.metrics_port}
    assert {port["targetPort"] for port in service["spec"]["ports"]} == {"http"}, "nobody outside reads metrics"
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(options.api_key_file.parent) in mounts


def test_compose_names_nothing_that_is_not_there() -> None:
    (compose,) = documents(DEPLOY / "compose.yaml")
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in compose["volumes"], source
        assert set(service.get("secrets", [])) <= set(compose["secrets"])
        assert set(service.get("depends_on", [])) <= set(compose["services"])
    niwaki = compose["services"]["niwaki"]
    options = options_in([*entry_point(), *niwaki["command"]])
    assert int(niwaki["stop_grace_period"].removesuffix("s")) > options.drain_seconds
    assert niwaki["ports"] == [f"127.0.0.1:{options.port}:{options.port}"]
    (prometheus,) = documents(DEPLOY / "prometheus.yaml")
    (job,) = prometheus["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    assert target == f"niwaki:{options.metrics_port}"
    assert "authorization" not in job


def test_the_dockerfile_copies_what_there_is_and_does_not_run_as_root() -> None:
    steps = instructions()
    assert {name for name, _ in steps} <= set(INSTRUCTIONS)
    assert steps[0][0] == "FROM"
    for name, rest in steps:
        words = shlex.split(rest)
        if name == "COPY" and not words[0].startswith("--from"):
            assert all((ROOT / source).exists() for source in words[:-1]), rest
    (user,) = [rest for name, rest in steps if name == "USER"]
    assert user == "10001"
    options = options_in(entry_point())
    (exposed,) = [rest for name, rest in steps if name == "EXPOSE"]
    assert int(exposed) == options.port


def dashboard_of() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana" / "dashboards" / "niwaki.json").read_text("utf-8"))
    return found


def test_the_dashboard_draws_metrics_that_the_server_tells(client: httpx2.Client) -> None:
    client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    told = set(re.findall(r"^# TYPE (\w+) ", client.get("/metrics").text, re.MULTILINE))
    dashboard = dashboard_of()
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    (scaler,) = documents(DEPLOY / "kubernetes" / "autoscaling.yaml")
    expressions += [metric["pods"]["metric"]["name"] for metric in scaler["spec"]["metrics"]]
    assert len(expressions) > 20
    for name in {found for text in expressions for found in re.findall(r"niwaki_\w+", text)}:
        assert name in told or name.removesuffix("_bucket") in told, name
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_dashboard_groups_by_labels_that_the_metrics_have() -> None:
    metrics = Metrics(lambda: {"tier_restored_tokens": 1.0})
    metrics.lost(ValueError("of the test"))
    metrics.refused.labels("overloaded").inc()
    metrics.answers.labels("200").inc()
    labels: dict[str, set[str]] = {}
    for name, listed in re.findall(r"^(\w+)(?:{(.*)})? ", metrics.text().decode(), re.MULTILINE):
        labels.setdefault(name, set()).update(re.findall(r'(\w+)="', listed))
    num_grouped = 0
    for panel in dashboard_of()["panels"]:
        for target in panel["targets"]:
            (name, *_) = re.findall(r"niwaki_\w+", target["expr"])
            wanted = {*re.findall(r"by \((\w+)\)", target["expr"]), *re.findall(r"{{(\w+)}}", target["legendFormat"])}
            assert wanted <= labels.get(name, set()), f"{name} of panel {panel['title']!r} has no {wanted}"
            num_grouped += bool(wanted)
    assert num_grouped > 10


def test_grafana_finds_the_dashboard_and_the_dashboard_its_source() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    (provider,) = documents(provisioning / "dashboards" / "niwaki.yaml")[0]["providers"]
    (source,) = documents(provisioning / "datasources" / "prometheus.yaml")[0]["datasources"]
    (compose,) = documents(DEPLOY / "compose.yaml")
    mounts = {volume.split(":")[1] for volume in compose["services"]["grafana"]["volumes"]}
    assert mounts == {"/etc/grafana/provisioning", provider["options"]["path"]}
    assert source["url"].split(":")[1] == "//prometheus"
    assert "prometheus" in compose["services"]
    for panel in dashboard_of()["panels"]:
        assert panel["datasource"] == {"type": source["type"], "uid": source["uid"]}


def test_the_documented_rule_offers_the_metric_that_the_autoscaler_reads() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text("utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (rule,) = yaml.safe_load(block)["rules"]
    (scaler,) = documents(DEPLOY / "kubernetes" / "autoscaling.yaml")
    (metric,) = scaler["spec"]["metrics"]
    assert re.match(r"\w+", rule["seriesQuery"])[0] == metric["pods"]["metric"]["name"]  # type: ignore[index]
    assert set(rule["resources"]["overrides"]) == {"namespace", "pod"}
