"""The connections between pods that NetworkPolicies allow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

NAMESPACE = "kubernetes.io/metadata.name"  # the label that each namespace has


@dataclass(frozen=True, slots=True)
class PodPlace:
    """The data of a pod by which NetworkPolicies select it."""

    name: str
    namespace: str
    labels: Mapping[str, str]
    ports: Mapping[str, int]  # ports of the pod's containers, by name


class Allowed(NamedTuple):
    """An allowed connection: a pod, by name, may connect to a port of another pod."""

    source: str
    target: str
    port: int


def allowed(policies: Iterable[Mapping[str, Any]], pods: Iterable[PodPlace]) -> set[Allowed]:
    """Returns the TCP connections that the policies allow; a pod without policies accepts all."""
    rules, places = list(policies), list(pods)
    return {
        Allowed(source.name, target.name, port)
        for source in places
        for target in places
        for name, port in target.ports.items()
        if source is not target
        and _passes(rules, "Egress", source, target, name, port)
        and _passes(rules, "Ingress", target, source, name, port)
    }


def _passes(
    rules: list[Mapping[str, Any]],
    direction: str,
    pod: PodPlace,
    peer: PodPlace,
    name: str,
    port: int,
) -> bool:
    """Returns whether a pod's policies of a direction allow a connection with the peer."""
    peers, entries = ("to", "egress") if direction == "Egress" else ("from", "ingress")
    own = [
        rule
        for rule in rules
        if rule["metadata"]["namespace"] == pod.namespace
        and direction in rule["spec"]["policyTypes"]
        and _matches(rule["spec"]["podSelector"], pod.labels)
    ]
    return not own or any(
        any(item["port"] in (name, port) for item in entry["ports"])
        and any(_is(item, peer, pod.namespace) for item in entry[peers])
        for rule in own
        for entry in rule["spec"].get(entries, [])
    )


def _is(selected: Mapping[str, Any], peer: PodPlace, namespace: str) -> bool:
    """Returns whether an entry of `from` or `to` in a policy of `namespace` selects a pod."""
    assert set(selected) <= {"namespaceSelector", "podSelector"}, selected
    if "namespaceSelector" in selected:
        if not _matches(selected["namespaceSelector"], {NAMESPACE: peer.namespace}):
            return False
    elif peer.namespace != namespace:
        return False
    return _matches(selected.get("podSelector", {}), peer.labels)


def _matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    assert set(selector) <= {"matchLabels", "matchExpressions"}, selector
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] == "In", expression
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return bool(selector.get("matchLabels", {}).items() <= labels.items())
