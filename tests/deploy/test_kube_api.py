"""A real API server accepts the manifests: checked strictly, without a node, as a dry run.

The tests need kube-apiserver, etcd and kubectl (`support.kube_api`), and for some overlays the
definitions of KEDA and of the Gateway API inference extension.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.kube_api import DEFINITIONS, KubeApi

FOLDER = Path(__file__).parents[2] / "deploy" / "k8s"
PLACES = sorted(path.parent for path in FOLDER.rglob("kustomization.yaml"))
DRY = ("--dry-run=server", "--validate=strict")


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeApi]:
    with KubeApi(tmp_path_factory.mktemp("kube")) as server:
        yield server


def made(api: KubeApi, place: Path) -> list[dict[str, Any]]:
    """Returns the documents that `kubectl kustomize` makes, and creates their namespaces.

    Skips the test if the server lacks the definition of a document's kind.
    """
    documents = list(yaml.safe_load_all(api.checked("kustomize", str(place))))
    lacking = {document["kind"] for document in documents} - api.kinds()
    if lacking:
        pytest.skip(f"no definition of {', '.join(sorted(lacking))}: ${DEFINITIONS} has none")
    for document in documents:
        if document["kind"] == "Namespace":
            api.checked("apply", "-f", "-", given=json.dumps(document))
    return documents


@pytest.mark.parametrize("place", PLACES, ids=lambda place: str(place.relative_to(FOLDER)))
def test_the_server_accepts_each_manifest(api: KubeApi, place: Path) -> None:
    documents = made(api, place)
    output = api.checked("apply", *DRY, "-f", "-", given=yaml.safe_dump_all(documents))
    assert len(output.splitlines()) == len(documents)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: str(place.relative_to(FOLDER)))
def test_pods_meet_the_security_standard_of_their_namespace(api: KubeApi, place: Path) -> None:
    """The server accepts the pods, which the test submits because no controller makes them here."""
    templates = [
        (document["metadata"]["namespace"], document["spec"]["template"])
        for document in made(api, place)
        if document["kind"] in ("Deployment", "StatefulSet")
    ]
    assert templates
    for number, (namespace, template) in enumerate(templates):
        meta = {**template["metadata"], "name": f"pod-{number}", "namespace": namespace}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": template["spec"]}
        api.checked("create", *DRY, "-f", "-", given=json.dumps(pod))


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"replica": 1}, "unknown field"),
        ({"replicas": -1}, "must be greater than or equal to 0"),
        ({"selector": {"matchLabels": {"another": "label"}}}, "does not match template"),
    ],
)
def test_the_server_finds_errors(api: KubeApi, fault: dict[str, Any], told: str) -> None:
    (broken,) = (
        document
        for document in made(api, FOLDER / "base")
        if document["kind"] == "Deployment" and document["metadata"]["name"] == "mlxpool-gateway"
    )
    broken["spec"].update(fault)
    done = api.kubectl("apply", *DRY, "-f", "-", given=json.dumps(broken))
    assert done.returncode != 0 and told in done.stderr


def test_a_privileged_pod_is_refused(api: KubeApi) -> None:
    made(api, FOLDER / "base")
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "pod", "namespace": "mlxpool"},
        "spec": {"containers": [{"name": "a", "image": "a"}]},
    }
    done = api.kubectl("create", *DRY, "-f", "-", given=json.dumps(pod))
    assert done.returncode != 0 and "violates PodSecurity" in done.stderr
