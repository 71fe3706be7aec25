"""Base job templates of the Kubernetes work pools: the worker's own default, patched.

`python -m infra.kubernetes.templates` writes `pools/*.json`, which is what clusters read.
"""

import argparse
import json
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect_kubernetes.worker import KubernetesWorker

POOLS_DIR = Path(__file__).parent / "pools"
NAMESPACE = "rollbook"
TAG = "0.1.0"
_USER = 1000
_QUEUED_S = 3600
"""How long a Job may wait for nodes or its queue before its flow run is called crashed."""


@dataclass(frozen=True)
class Pool:
    """What jobs of one work pool need from a cluster. Quantities are Kubernetes'."""

    image: str
    cpu: str
    memory: str
    cache: str
    shm: str
    gpus: int = 0
    nodes: str = "cpu"
    """Value of the node label `rollbook/nodes`."""
    taints: tuple[str, ...] = ()
    """Keys of taints that are tolerated."""
    queue: str | None = None
    """Kueue's local queue."""
    runtime_class: str | None = None
    grace_s: int = 60
    """A drain takes 15 seconds, a trainer's snapshot longer; spot notices may be shorter."""


POOLS = {
    "driver": Pool("rollbook-cpu", cpu="2", memory="8Gi", cache="50Gi", shm="256Mi"),
    "rollout-gpu": Pool(
        "rollbook-gpu",
        cpu="8",
        memory="64Gi",
        cache="200Gi",
        shm="16Gi",
        gpus=1,
        nodes="gpu-spot",
        taints=("nvidia.com/gpu", "rollbook/spot"),
    ),
    "train-gpu": Pool(
        "rollbook-gpu",
        cpu="32",
        memory="256Gi",
        cache="500Gi",
        shm="64Gi",
        gpus=4,
        nodes="gpu-reserved",
        taints=("nvidia.com/gpu",),
        queue="train",
        grace_s=300,
    ),
    "reward-cpu": Pool(
        "rollbook-cpu",
        cpu="4",
        memory="8Gi",
        cache="10Gi",
        shm="256Mi",
        runtime_class="gvisor",
    ),
}


def base_job_template(name: str, *, registry: str = "") -> dict[str, Any]:
    """Returns the template of a pool; `registry` is put before the images' names."""
    pool = POOLS[name]
    template = deepcopy(KubernetesWorker.get_default_base_job_template())
    _set_defaults(template["variables"]["properties"], pool, registry)
    manifest = template["job_configuration"]["job_manifest"]
    if pool.queue:
        manifest["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": pool.queue}
    # Never Kubernetes' own retries: the flow run is scheduled anew, and the store knows the rest.
    manifest["spec"]["backoffLimit"] = 0
    pod_template = manifest["spec"]["template"]
    pod_template["metadata"] = {"labels": {"app.kubernetes.io/component": name}}
    pod_template["spec"].update(_pod(name, pool))
    container = pod_template["spec"]["containers"][0]
    container.update(_container())
    if pool.gpus:
        for kind in ("limits", "requests"):
            container["resources"][kind]["nvidia.com/gpu"] = "{{ gpus }}"
    return template


def _set_defaults(variables: dict[str, Any], pool: Pool, registry: str) -> None:
    prefix = f"{registry.rstrip('/')}/" if registry else ""
    defaults = {
        "namespace": NAMESPACE,
        "image": f"{prefix}{pool.image}:{TAG}",
        "service_account_name": "rollbook-job",
        "finished_job_ttl": 3600,
        "pod_watch_timeout_seconds": _QUEUED_S,
        "cpu_request": pool.cpu,
        "cpu_limit": pool.cpu,
        "memory_request": pool.memory,
        "memory_limit": pool.memory,
    }
    for name, value in defaults.items():
        variables[name]["default"] = value
    del variables["backoff_limit"]
    added = {
        "shm_size": ("Shared memory", "Size of /dev/shm; it counts as memory.", pool.shm),
        "cache_size": ("Cache", "Size of the volume on local NVMe.", pool.cache),
        "nodes": ("Nodes", "Value of the node label rollbook/nodes.", pool.nodes),
    }
    for name, (title, description, default) in added.items():
        variables[name] = {
            "type": "string",
            "title": title,
            "description": description,
            "default": default,
        }
    if pool.gpus:
        # Services that a controller starts here are called from another pod.
        variables["env"]["default"] = {"ROLLBOOK_SERVICE_HOST": "0.0.0.0"}
        variables["gpus"] = {
            "type": "integer",
            "minimum": 1,
            "title": "GPUs",
            "description": "Whole GPUs of one node.",
            "default": pool.gpus,
        }


def _pod(name: str, pool: Pool) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": pool.grace_s,
        "nodeSelector": {"rollbook/nodes": "{{ nodes }}"},
        "tolerations": [
            {"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in pool.taints
        ],
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {"app.kubernetes.io/component": name}},
            }
        ],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": _volumes(),
    }
    if pool.runtime_class:
        spec["runtimeClassName"] = pool.runtime_class
    return spec


def _volumes() -> list[dict[str, Any]]:
    claim = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "local-nvme",
        "resources": {"requests": {"storage": "{{ cache_size }}"}},
    }
    return [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "{{ shm_size }}"}},
        # One claim for each pod, gone with it: a claim that outlives its pod ties it to a node.
        {"name": "home", "ephemeral": {"volumeClaimTemplate": {"spec": claim}}},
        {"name": "token", "secret": {"secretName": "rollbook-service-token"}},
    ]


def _container() -> dict[str, Any]:
    return {
        "envFrom": [
            {"configMapRef": {"name": "rollbook"}},
            # Absent where workload identity gives the credentials.
            {"secretRef": {"name": "rollbook-s3", "optional": True}},
        ],
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "home", "mountPath": "/var/lib/rollbook"},
            {"name": "token", "mountPath": "/var/run/rollbook", "readOnly": True},
        ],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def as_json(template: dict[str, Any]) -> str:
    """Returns a template as its file holds it."""
    return json.dumps(template, indent=2, sort_keys=True) + "\n"


def main() -> None:
    """Writes the templates of all pools."""
    parser = argparse.ArgumentParser(prog="infra.kubernetes.templates", description=__doc__)
    parser.add_argument("--registry", default="", help="put before the images' names")
    parser.add_argument("--out", type=Path, default=POOLS_DIR)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    for name in POOLS:
        (asked.out / f"{name}.json").write_text(
            as_json(base_job_template(name, registry=asked.registry))
        )


if __name__ == "__main__":
    main()
