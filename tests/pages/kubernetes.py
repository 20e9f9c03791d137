"""What our manifests use of the schemas of KubeRay's RayJob and of JobSet, from their documentation; other names are
mistakes.
"""

from typing import Any


def _table(required: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


def _list(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": of, "minItems": 1}


_TEXT = {"type": "string", "minLength": 1}
_TEXTS = {"type": "object", "additionalProperties": _TEXT}
_COUNT = {"type": "integer", "minimum": 0}
_FLAG = {"type": "boolean"}
# A quantity of Kubernetes: numbers of devices are whole.
_QUANTITY = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|Ki|Mi|Gi|Ti)?$"}
_QUANTITIES = {"type": "object", "additionalProperties": _QUANTITY}
_NAME = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}
_METADATA = _table(("name",), name=_NAME, labels=_TEXTS, annotations=_TEXTS)
_SECRET = _table(("name", "key"), name=_NAME, key=_TEXT)
_ENVIRONMENT = _table(("name",), name=_TEXT, value=_TEXT, valueFrom=_table(("secretKeyRef",), secretKeyRef=_SECRET))
_CONTAINER = _table(
    ("name", "image"),
    name=_NAME,
    image=_TEXT,
    command=_list(_TEXT),
    args=_list(_TEXT),
    env=_list(_ENVIRONMENT),
    resources=_table(requests=_QUANTITIES, limits=_QUANTITIES),
    volumeMounts=_list(_table(("name", "mountPath"), name=_NAME, mountPath=_TEXT)),
)
_VOLUME = _table(
    ("name",),
    name=_NAME,
    persistentVolumeClaim=_table(("claimName",), claimName=_NAME),
    emptyDir=_table(medium={"enum": ["Memory"]}, sizeLimit=_QUANTITY),
)
_POD = _table(
    ("spec",),
    metadata=_table(labels=_TEXTS, annotations=_TEXTS),
    spec=_table(
        ("containers",),
        restartPolicy={"enum": ["Always", "OnFailure", "Never"]},
        terminationGracePeriodSeconds=_COUNT,
        containers=_list(_CONTAINER),
        volumes=_list(_VOLUME),
    ),
)
_WORKERS = _table(
    ("groupName", "minReplicas", "maxReplicas", "template"),
    groupName=_NAME,
    replicas=_COUNT,
    minReplicas=_COUNT,
    maxReplicas=_COUNT,
    rayStartParams=_TEXTS,
    template=_POD,
)
RAY_JOB = _table(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=_METADATA,
    spec=_table(
        ("entrypoint", "rayClusterSpec"),
        entrypoint=_TEXT,
        shutdownAfterJobFinishes=_FLAG,
        ttlSecondsAfterFinished=_COUNT,
        backoffLimit=_COUNT,
        rayClusterSpec=_table(
            ("headGroupSpec",),
            rayVersion=_TEXT,
            headGroupSpec=_table(("template",), rayStartParams=_TEXTS, template=_POD),
            workerGroupSpecs=_list(_WORKERS),
        ),
    ),
)
_JOB = _table(
    ("template",),
    parallelism=_COUNT,
    completions=_COUNT,
    completionMode={"enum": ["Indexed", "NonIndexed"]},
    backoffLimit=_COUNT,
    template=_POD,
)
JOB_SET = _table(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=_METADATA,
    spec=_table(
        ("replicatedJobs",),
        failurePolicy=_table(maxRestarts=_COUNT),
        replicatedJobs=_list(
            _table(("name", "template"), name=_NAME, replicas=_COUNT, template=_table(("spec",), spec=_JOB))
        ),
    ),
)
