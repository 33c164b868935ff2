"""What the Prometheus operator's CRDs (monitoring.coreos.com/v1, operator 0.82) allow, as far as this project uses it; all else is refused."""

from __future__ import annotations

from typing import Any


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
TEXTS: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "string"}}
DURATION: dict[str, Any] = {"type": "string", "pattern": r"^(0|(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?)$"}
METADATA = _object(("name",), name=TEXT, namespace=TEXT, labels=TEXTS, annotations=TEXTS)

_RULE = _object(("alert", "expr"), alert=TEXT, expr=TEXT, labels=TEXTS, annotations=TEXTS, **{"for": DURATION})
_GROUP = _object(("name",), name=TEXT, interval=DURATION, rules=_list(_RULE))
_ENDPOINT = _object((), port=TEXT, path=TEXT, scheme=TEXT, interval=DURATION, scrapeTimeout=DURATION)
_MONITOR = _object(
    ("selector", "podMetricsEndpoints"),
    selector=_object((), matchLabels=TEXTS),
    podTargetLabels=_list(TEXT),
    podMetricsEndpoints=_list(_ENDPOINT),
)

SPECS = {"PrometheusRule": _object((), groups=_list(_GROUP)), "PodMonitor": _MONITOR}
SCHEMAS = {
    kind: _object(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": "monitoring.coreos.com/v1"},
        kind={"const": kind},
        metadata=METADATA,
        spec=spec,
    )
    for kind, spec in SPECS.items()
}
