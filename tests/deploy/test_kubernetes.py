"""The manifests: each matches its schema strictly, and they agree with each other and mlxpool."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import promql_parser
import pytest
import yaml
from msgspec.structs import fields

from mlxpool.broker.telemetry.metric_table import FAMILIES
from mlxpool.broker.telemetry.reports import pool_stats
from mlxpool.common.config.bounds import host_port
from mlxpool.common.config.loading import load
from mlxpool.common.config.schema import PoolConfig
from mlxpool.gateway.settings import Settings
from support import snapshots
from support.command_lines import parsed
from support.core_harness import Story
from support.pool import PATIENCE

FOLDER = Path(__file__).parents[2] / "deploy" / "k8s"
VERSION = "1.33"
PLACES = sorted(path.parent for path in FOLDER.rglob("kustomization.yaml"))
CONFIG = FOLDER / "base" / "mlxpool.toml"
NAMESPACES = {"mlxpool", "mlxpool-2", "mlxpool-inference"}
# Allowed keys of kinds that do not belong to Kubernetes.
KUSTOMIZATION = {
    "apiVersion", "kind", "namespace", "labels", "resources", "configMapGenerator", "images",
    "patches",
}  # fmt: skip
SCALED_OBJECT = {
    "scaleTargetRef", "pollingInterval", "cooldownPeriod", "minReplicaCount", "maxReplicaCount",
    "triggers",
}  # fmt: skip


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text("utf-8")))


def kustomization(place: Path) -> dict[str, Any]:
    (document,) = documents(place / "kustomization.yaml")
    return document


def patches(place: Path) -> list[str]:
    """Returns the patch files of a kustomization."""
    return [patch["path"] for patch in kustomization(place).get("patches", []) if "path" in patch]


def own(place: Path) -> Iterator[dict[str, Any]]:
    """Returns the documents that a kustomization adds to its bases."""
    for name in kustomization(place)["resources"]:
        if (place / name).is_file():
            yield from documents(place / name)


EVERY = [document for place in PLACES for document in own(place)]


def named(kind: str, name: str) -> dict[str, Any]:
    (document,) = [d for d in EVERY if d["kind"] == kind and d["metadata"]["name"] == name]
    return document


def check(document: dict[str, Any]) -> None:
    """Raises for a field that is unknown, missing or of a wrong type."""
    own = OTHERS.get(document["apiVersion"])
    if own is None:
        kubernetes_validate.validate(document, VERSION, strict=True)
    else:
        own(document)


def check_scaled_object(document: dict[str, Any]) -> None:
    """Checks a ScaledObject, a kind of KEDA, by hand: no Python package has its schema."""
    assert document["kind"] == "ScaledObject"
    spec = document["spec"]
    assert set(spec) <= SCALED_OBJECT
    assert named("Deployment", spec["scaleTargetRef"]["name"])
    assert 0 <= spec["minReplicaCount"] <= spec["maxReplicaCount"]
    for trigger in spec["triggers"]:
        assert trigger["type"] == "metrics-api"
        assert set(trigger["metadata"]) == {"url", "valueLocation", "targetValue"}
        assert all(isinstance(value, str) for value in trigger["metadata"].values())


def check_inference_pool(document: dict[str, Any]) -> None:
    """Checks the keys of an InferencePool, a kind of the Gateway API inference extension.

    test_kube_api.py checks its schema.
    """
    assert document["kind"] == "InferencePool"
    assert set(document["spec"]) == {"selector", "targetPorts", "endpointPickerRef"}


OTHERS: dict[str, Callable[[dict[str, Any]], None]] = {
    "keda.sh/v1alpha1": check_scaled_object,
    "inference.networking.k8s.io/v1": check_inference_pool,
}


@pytest.mark.parametrize("document", EVERY, ids=lambda d: f"{d['kind']}-{d['metadata']['name']}")
def test_each_manifest_matches_its_schema(document: dict[str, Any]) -> None:
    check(document)


@pytest.mark.parametrize("fault", [{"replica": 1}, {"replicas": "one"}])
def test_the_schema_check_finds_errors(fault: dict[str, Any]) -> None:
    broken = named("Deployment", "mlxpool-worker-demo")
    with pytest.raises(kubernetes_validate.ValidationError):
        check({**broken, "spec": {**broken["spec"], **fault}})


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_a_kustomization_names_existing_files(place: Path) -> None:
    document = kustomization(place)
    assert set(document) <= KUSTOMIZATION
    for name in (*document["resources"], *patches(place)):
        assert (place / name).exists(), name
    generated = [
        name for generator in document.get("configMapGenerator", []) for name in generator["files"]
    ]
    assert all((place / name).is_file() for name in generated)
    listed = {*document["resources"], *patches(place), *generated, "kustomization.yaml"}
    assert {path.name for path in place.glob("*.yaml")} <= listed, "a file that nobody uses"


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_the_output_of_kustomize_matches_the_schemas(place: Path) -> None:
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("no kubectl here")
    done = subprocess.run(
        [program, "kustomize", str(place)], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    manifests = list(yaml.safe_load_all(done.stdout))
    for document in manifests:
        check(document)
        assert document["kind"] == "Namespace" or document["metadata"]["namespace"] in NAMESPACES
    images = [
        container["image"]
        for document in manifests
        if document["kind"] in ("Deployment", "StatefulSet")
        for container in containers(document)
    ]
    assert images and all(image.startswith("registry.example/mlxpool:0.1.0-") for image in images)


def pod(document: dict[str, Any]) -> dict[str, Any]:
    return dict(document["spec"]["template"]["spec"])


def containers(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod(document).get("initContainers", []), *pod(document)["containers"]]


RUNNING = [document for document in EVERY if document["kind"] in ("Deployment", "StatefulSet")]


@pytest.mark.parametrize("document", RUNNING, ids=lambda d: d["metadata"]["name"])
def test_a_workload_has_few_privileges(document: dict[str, Any]) -> None:
    assert pod(document)["automountServiceAccountToken"] is False
    context = pod(document)["securityContext"]
    assert context["runAsNonRoot"] is True and context["runAsUser"] == 10001
    for container in containers(document):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["limits"]["memory"]


@pytest.mark.parametrize("document", RUNNING, ids=lambda d: d["metadata"]["name"])
def test_mounted_volumes_exist(document: dict[str, Any]) -> None:
    volumes = {volume["name"] for volume in pod(document)["volumes"]}
    mounted = {m["name"] for c in containers(document) for m in c["volumeMounts"]}
    assert mounted == volumes
    labels = document["spec"]["template"]["metadata"]["labels"]
    assert document["spec"]["selector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize("document", RUNNING, ids=lambda d: d["metadata"]["name"])
def test_its_command_line_is_valid(document: dict[str, Any]) -> None:
    (container,) = pod(document)["containers"]
    parsed(container["args"])


def container_of(component: str) -> dict[str, Any]:
    """Returns the one container of the workload with this label."""
    (spec,) = (
        container
        for document in RUNNING
        for container in pod(document)["containers"]
        if document["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"] == component
    )
    return dict(spec)


def broker() -> dict[str, Any]:
    return container_of("broker")


def test_the_brokers_probes() -> None:
    assert broker()["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert broker()["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}


def ports(container: dict[str, Any]) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container["ports"]}


def test_the_ports_are_those_of_the_settings() -> None:
    pool = tomllib.loads(CONFIG.read_text("utf-8"))["pool"]
    (front,), (back,) = pool["front"], pool["back"]
    http = host_port(pool["metrics"])[1]
    assert ports(broker()) == {
        "front": int(front.rpartition(":")[2]),
        "back": int(back.rpartition(":")[2]),
        "http": http,
    }
    for document in EVERY:
        if document["kind"] == "Service":
            component = document["spec"]["selector"]["app.kubernetes.io/component"]
            for port in document["spec"]["ports"]:
                assert port["port"] == ports(container_of(component))[port["targetPort"]]
    (trigger,) = named("ScaledObject", "mlxpool-worker-demo")["spec"]["triggers"]
    assert f":{http}/stats" in trigger["metadata"]["url"]


def test_the_gateway_listens_on_its_port_and_dials_the_brokers() -> None:
    gateway = container_of("gateway")
    options = parsed(gateway["args"])
    assert ports(gateway) == {"http": options.port}
    assert options.endpoints == [f"tcp://mlxpool:{ports(broker())['front']}"]
    (front,) = named("Service", "mlxpool")["spec"]["ports"]
    assert front["port"] == ports(broker())["front"]
    installed = pod(named("Deployment", "mlxpool-gateway"))["initContainers"][0]["command"]
    names = {Path(path).name for path in installed[3:-1]}
    used = {options.keys, *map(Path, (options.key, *options.server_keys))}
    assert {path.name for path in used} == names and {path.parent for path in used} == {
        Path("/keys")
    }


def test_the_gateway_of_several_pools_dials_each_with_its_key() -> None:
    (patch,) = documents(FOLDER / "overlays" / "pools" / "gateway.yaml")
    options = parsed(containers(patch)[1]["args"])
    assert options.endpoints == ["tcp://mlxpool:7200", "tcp://mlxpool.mlxpool-2.svc:7200"]
    second = kustomization(FOLDER / "overlays" / "pools" / "second")
    assert f".{second['namespace']}.svc" in options.endpoints[1]
    installed = {Path(path).name for path in containers(patch)[0]["command"][3:-1]}
    used = {options.keys, *map(Path, (options.key, *options.server_keys))}
    assert {path.name for path in used} == installed
    assert len(options.server_keys) == len(options.endpoints)


def test_the_gateway_has_time_for_its_answers() -> None:
    document = pod(named("Deployment", "mlxpool-gateway"))
    (container,) = document["containers"]
    waits = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert document["terminationGracePeriodSeconds"] > waits + Settings().drain_timeout


def test_the_files_that_the_settings_name_are_mounted() -> None:
    pool = tomllib.loads(CONFIG.read_text("utf-8"))["pool"]
    mounts = {mount["mountPath"] for mount in broker()["volumeMounts"]}
    assert str(Path(pool["secret_key"]).parent) in mounts
    assert str(Path(broker()["args"][2]).parent) in mounts
    assert Path(broker()["args"][2]).name == CONFIG.name


def test_a_broker_understands_its_settings() -> None:
    known = {field.name for field in fields(PoolConfig)}
    table = tomllib.loads(CONFIG.read_text("utf-8"))
    assert set(table["pool"]) <= known
    config = load(CONFIG)
    assert {name: getattr(config, name) for name in ("metrics", "log_format")} == {
        name: table["pool"][name] for name in ("metrics", "log_format")
    }


def test_policies_and_budgets_select_existing_pods() -> None:
    labels = [document["spec"]["template"]["metadata"]["labels"] for document in RUNNING]
    for document in EVERY:
        if document["kind"] not in ("NetworkPolicy", "PodDisruptionBudget"):
            continue
        selector = document["spec"].get("podSelector", document["spec"].get("selector"))
        wanted = selector.get("matchLabels", {}).items()
        assert any(wanted <= each.items() for each in labels), document["metadata"]["name"]


def test_the_autoscaler_keeps_to_the_brokers_bounds() -> None:
    spec = named("HorizontalPodAutoscaler", "mlxpool-worker-demo")["spec"]
    (metric,) = spec["metrics"]
    wanted = metric["external"]["metric"]
    assert wanted["name"] == "mlxpool_replicas_wanted"
    (family,) = (candidate for candidate in FAMILIES if candidate.name == wanted["name"])
    assert tuple(wanted["selector"]["matchLabels"]) == family.labels
    assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}
    bounds = load(CONFIG).models[wanted["selector"]["matchLabels"]["model"]].scaling
    assert (bounds.min, bounds.max) == (spec["minReplicas"], spec["maxReplicas"])


def test_the_endpoint_picker_reads_existing_series() -> None:
    place = FOLDER / "overlays" / "inference"
    (picker,) = documents(place / "picker.yaml")
    known = {family.name: set(family.labels) for family in FAMILIES}
    (engine,) = next(
        plugin["parameters"]["engineConfigs"]
        for plugin in picker["plugins"]
        if plugin["type"] == "core-metrics-extractor"
    )
    specs = [value for name, value in engine.items() if name.endswith("Spec")]
    assert len(specs) == 3
    for spec in specs:
        selector: Any = promql_parser.parse(spec)
        matchers = {matcher.name: matcher.value for matcher in selector.matchers.matchers}
        assert matchers.items() <= {"model": "demo"}.items() and "model" in known[selector.name]
    types = {plugin["type"] for plugin in picker["plugins"]}
    (profile,) = picker["schedulingProfiles"]
    assert {plugin["pluginRef"] for plugin in profile["plugins"]} <= types


def test_a_pod_of_a_group_has_a_gpu_for_each_rank() -> None:
    place = FOLDER / "overlays" / "groups"
    (container,) = pod(named("StatefulSet", "mlxpool-worker-big"))["containers"]
    options = parsed(container["args"])
    model = load(place / "mlxpool.toml").models[options.name]
    assert model.devices == int(container["resources"]["limits"]["nvidia.com/gpu"]) > 1
    assert Path(options.config).name in kustomization(place)["configMapGenerator"][0]["files"]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {str(Path(options.config).parent), str(Path(model.path).parent)} <= mounts
    rest = (place / "mlxpool.toml").read_text().replace(
        '[models.big]\npath = "/models/big"\ndevices = 2\n\n', ""
    )  # fmt: skip
    assert rest == CONFIG.read_text(), "the base has other settings"


@pytest.mark.parametrize("place", ["base", "overlays/groups", "overlays/inference"])
def test_a_broker_without_a_disk_keeps_no_jobs(place: str) -> None:
    assert load(FOLDER / place / "mlxpool.toml").state_dir == ""


def test_a_broker_that_keeps_jobs_has_a_volume_of_its_own_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = FOLDER / "overlays" / "jobs"
    (patch,) = documents(place / "broker.yaml")
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    assert container["name"] == broker()["name"]
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    config = load(CONFIG)
    (mount,) = container["volumeMounts"]
    assert Path(config.state_dir).parent == Path(mount["mountPath"])
    (claim,) = patch["spec"]["volumeClaimTemplates"]
    assert mount["name"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOncePod"], "one broker for one store"
    room = int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi")) * 2**30
    assert room > 2 * config.state_bytes, "no room for the copy before a change of the schema"
    (added,) = [entry for entry in kustomization(place)["patches"] if "patch" in entry]
    (operation,) = yaml.safe_load(added["patch"])
    args = containers(named("Deployment", "mlxpool-gateway"))[-1]["args"]
    assert parsed([*args, operation["value"]]).name_owners is True


def test_an_inference_pool_names_the_port_of_its_pods() -> None:
    place = FOLDER / "overlays" / "inference"
    spec = named("InferencePool", "mlxpool")["spec"]
    pods = named("Deployment", "mlxpool")
    labels = pods["spec"]["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    served = load(place / "mlxpool.toml")
    http, metrics = (host_port(each)[1] for each in (served.http, served.metrics))
    assert ports(containers(pods)[1]) == {"http": http, "metrics": metrics}
    assert spec["targetPorts"] == [{"number": http}]
    text = (place / "kustomization.yaml").read_text()
    assert f"--model-server-metrics-port={metrics}" in text


def test_the_scaling_figure_is_one_of_the_stats() -> None:
    (trigger,) = named("ScaledObject", "mlxpool-worker-demo")["spec"]["triggers"]
    value: Any = pool_stats(snapshots.of(Story()))
    for key in trigger["metadata"]["valueLocation"].split("."):
        value = value[key]
    assert value == 0
