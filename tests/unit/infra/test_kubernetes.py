"""Kubernetes objects by schema, and Jobs as the Prefect worker itself renders them.

No cluster takes part: an object that fits its schema may still be refused, or never be scheduled.
"""

import asyncio
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any
from uuid import UUID

import kubernetes_validate
import pytest
import yaml
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

from infra.automations import POOLS as LOCAL_POOLS
from infra.kubernetes.templates import POOLS, POOLS_DIR, as_json, base_job_template

KUBERNETES = POOLS_DIR.parent
OVERLAYS = ("8-gpus", "64-gpus", "1024-gpus")
VERSION = "1.34.0"
GPU = "nvidia.com/gpu"
GPU_POOLS = [name for name, pool in POOLS.items() if pool.gpus]
# No package carries the schemas of their CRDs. Pods inside a JobSet are checked all the same.
NOT_VALIDATED = ("ClusterQueue", "JobSet", "LocalQueue", "ResourceFlavor")


@cache
def rendered(overlay: str) -> list[dict[str, Any]]:
    kubectl = Path(sys.executable).with_name("kubectl")
    command = [str(kubectl), "kustomize", str(KUBERNETES / "overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "kustomize warns of what is deprecated"
    return list(yaml.safe_load_all(done.stdout))


def the(overlay: str, kind: str, name: str) -> dict[str, Any]:
    (found,) = [
        each
        for each in rendered(overlay)
        if each["kind"] == kind and each["metadata"]["name"] == name
    ]
    return found


def gang(overlay: str) -> dict[str, Any]:
    """Returns the Job of the JobSet."""
    (replicated,) = the(overlay, "JobSet", "train-service")["spec"]["replicatedJobs"]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": replicated["name"]},
        **replicated["template"],
    }


def pods(overlay: str) -> dict[str, dict[str, Any]]:
    found = {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in rendered(overlay)
        if each["kind"] == "Deployment"
    }
    return {**found, "train-service": gang(overlay)["spec"]["template"]["spec"]}


@cache
def job(pool: str, **variables: Any) -> dict[str, Any]:
    """Returns what the worker would create for a sample flow run."""
    template = json.loads((POOLS_DIR / f"{pool}.json").read_text())
    configuration = _from_template(template, {"env": {"SAMPLE": "1"}, **variables})
    flow_run = FlowRun(
        id=UUID(int=1), flow_id=UUID(int=2), name="sample-run", deployment_id=UUID(int=3)
    )
    configuration.prepare_for_flow_run(flow_run)
    return configuration.job_manifest


def _from_template(
    template: dict[str, Any], values: dict[str, Any]
) -> KubernetesWorkerJobConfiguration:
    async def make() -> KubernetesWorkerJobConfiguration:
        # A client that is open, though never asked: else Prefect starts a server for it.
        async with PrefectClient("http://127.0.0.1:9/api") as client:
            return await KubernetesWorkerJobConfiguration.from_template_and_values(
                template, values, client=client
            )

    return asyncio.run(make())


def pod(pool: str, **variables: Any) -> dict[str, Any]:
    return job(pool, **variables)["spec"]["template"]["spec"]


def assert_is_not_root(spec: dict[str, Any]) -> None:
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == 1000
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def shared_memory(spec: dict[str, Any]) -> str:
    (mount,) = [
        each for each in spec["containers"][0]["volumeMounts"] if each["mountPath"] == "/dev/shm"
    ]
    (volume,) = [each for each in spec["volumes"] if each["name"] == mount["name"]]
    assert volume["emptyDir"]["medium"] == "Memory"
    return volume["emptyDir"]["sizeLimit"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_fits_its_schema(overlay: str) -> None:
    for each in rendered(overlay):
        if each["kind"] not in NOT_VALIDATED:
            kubernetes_validate.validate(each, VERSION, strict=True)
    kubernetes_validate.validate(gang(overlay), VERSION, strict=True)


@pytest.mark.parametrize("kind", NOT_VALIDATED)
def test_a_kind_without_a_schema_is_said_to_be_unchecked(kind: str) -> None:
    (each,) = [each for each in rendered("8-gpus") if each["kind"] == kind]
    with pytest.raises(kubernetes_validate.SchemaNotFoundError):
        kubernetes_validate.validate(each, VERSION)
    pytest.skip(f"{kind} ({each['apiVersion']}) is not validated: no package carries its schema")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_pod_is_root_and_each_has_limits_and_its_image_by_version(overlay: str) -> None:
    for name, spec in pods(overlay).items():
        assert_is_not_root(spec)
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert container["image"].endswith(":0.1.0"), name
            assert container["resources"]["limits"].keys() >= {"cpu", "memory"}, name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_a_pod_names_exists(overlay: str) -> None:
    names = {(each["kind"], each["metadata"]["name"]) for each in rendered(overlay)}
    jobs = {pool: pod(pool) for pool in POOLS}
    for name, spec in (pods(overlay) | jobs).items():
        assert ("ServiceAccount", spec["serviceAccountName"]) in names, name
        for field, kind in (
            ("priorityClassName", "PriorityClass"),
            ("runtimeClassName", "RuntimeClass"),
        ):
            assert field not in spec or (kind, spec[field]) in names, name
        for source in spec["containers"][0]["envFrom"]:
            if "configMapRef" in source:
                assert ("ConfigMap", source["configMapRef"]["name"]) in names, name
        for volume in spec["volumes"]:
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in names, name


def test_what_belongs_to_the_cluster_has_no_namespace() -> None:
    without = {each["kind"] for each in rendered("8-gpus") if "namespace" not in each["metadata"]}
    of_cluster = {"Namespace", "PriorityClass", "RuntimeClass", "ClusterQueue", "ResourceFlavor"}
    assert without == of_cluster


@pytest.mark.parametrize(("overlay", "gpus"), [("8-gpus", 8), ("64-gpus", 64), ("1024-gpus", 64)])
def test_a_run_takes_the_gpus_that_its_overlay_says(overlay: str, gpus: int) -> None:
    rollout = the(overlay, "Deployment", "rollout-service")
    trainer = pods(overlay)["train-service"]["containers"][0]["resources"]["limits"][GPU]
    each = pods(overlay)["rollout-service"]["containers"][0]["resources"]["limits"][GPU]
    assert rollout["spec"]["replicas"] * each + trainer == gpus
    queue = the(overlay, "ClusterQueue", "rollbook-train")
    (flavor,) = queue["spec"]["resourceGroups"][0]["flavors"]
    quota = {resource["name"]: resource["nominalQuota"] for resource in flavor["resources"]}
    assert quota[GPU] >= trainer, "the gang would wait for ever"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_rollout_may_be_preempted_and_train_is_one_gang(overlay: str) -> None:
    rollout, train = pods(overlay)["rollout-service"], pods(overlay)["train-service"]
    assert {each["key"] for each in rollout["tolerations"]} == {GPU, "rollbook/spot"}
    assert {each["key"] for each in train["tolerations"]} == {GPU}
    assert rollout["terminationGracePeriodSeconds"] > 15, "a drain takes 15 s"
    budget = the(overlay, "PodDisruptionBudget", "rollout-service")["spec"]["selector"]
    deployed = the(overlay, "Deployment", "rollout-service")["spec"]["selector"]
    assert budget == deployed
    labels = the(overlay, "JobSet", "train-service")["metadata"]["labels"]
    assert ("LocalQueue", labels["kueue.x-k8s.io/queue-name"]) in {
        (each["kind"], each["metadata"]["name"]) for each in rendered(overlay)
    }
    assert gang(overlay)["spec"]["backoffLimit"] == 0


def test_every_worker_puts_the_template_of_its_own_pool() -> None:
    templates = [
        each
        for each in rendered("8-gpus")
        if each["kind"] == "ConfigMap" and each["metadata"]["name"].startswith("pools-")
    ]
    assert set(templates[0]["data"]) == {f"{pool}.json" for pool in POOLS}
    for pool in POOLS:
        spec = pods("8-gpus")[f"worker-{pool}"]
        made, started = spec["initContainers"][0]["args"], spec["containers"][0]["args"]
        assert made[3] == pool
        assert made[-1] == f"/etc/rollbook/pools/{pool}.json"
        assert started[started.index("--pool") + 1] == pool


def test_reward_jobs_reach_names_prefect_and_the_store_only() -> None:
    policy = the("8-gpus", "NetworkPolicy", "reward-egress")["spec"]
    component = job("reward-cpu")["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= component.items()
    assert "Egress" in policy["policyTypes"]
    assert [[port["port"] for port in rule["ports"]] for rule in policy["egress"]] == [
        [53, 53],
        [4200],
        [443],
    ]
    assert all(rule["to"] for rule in policy["egress"]), "an empty list is everywhere"
    assert pod("reward-cpu")["runtimeClassName"] == "gvisor"


def test_the_pools_are_those_of_one_machine() -> None:
    assert set(POOLS) == set(LOCAL_POOLS)


@pytest.mark.parametrize("pool", POOLS)
def test_templates_are_the_workers_own_default_patched(pool: str) -> None:
    expected = as_json(base_job_template(pool))
    assert (POOLS_DIR / f"{pool}.json").read_text() == expected, (
        "run `python -m infra.kubernetes.templates`"
    )


@pytest.mark.parametrize("pool", POOLS)
def test_the_worker_renders_a_job_that_fits_its_schema(pool: str) -> None:
    manifest = json.loads(json.dumps(job(pool)))
    # Prefect puts these two into the pod as well, and insists on them; a cluster drops them.
    for misplaced in ("parallelism", "completions"):
        del manifest["spec"]["template"]["spec"][misplaced]
    kubernetes_validate.validate(manifest, VERSION, strict=True)
    assert "{{" not in json.dumps(manifest)


@pytest.mark.parametrize("pool", POOLS)
def test_a_job_is_never_retried_by_kubernetes_and_is_not_root(pool: str) -> None:
    assert job(pool)["spec"]["backoffLimit"] == 0
    spec = pod(pool)
    assert_is_not_root(spec)
    assert spec["restartPolicy"] == "Never"
    assert spec["automountServiceAccountToken"] is False
    assert shared_memory(spec) == POOLS[pool].shm
    env = {each["name"]: each.get("value") for each in spec["containers"][0]["env"]}
    assert env["SAMPLE"] == "1"
    assert env["PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR"] == "reschedule"


@pytest.mark.parametrize("pool", GPU_POOLS)
def test_gpus_come_with_their_nodes_and_tolerations(pool: str) -> None:
    spec = pod(pool)
    resources = spec["containers"][0]["resources"]
    assert resources["limits"][GPU] == resources["requests"][GPU] == POOLS[pool].gpus
    assert spec["nodeSelector"] == {"rollbook/nodes": POOLS[pool].nodes}
    assert {each["key"] for each in spec["tolerations"]} >= {GPU}
    assert spec["topologySpreadConstraints"][0]["topologyKey"] == "kubernetes.io/hostname"


def test_a_deployment_may_ask_for_other_gpus_and_shared_memory() -> None:
    spec = pod("train-gpu", gpus=8, shm_size="128Gi")
    assert spec["containers"][0]["resources"]["limits"][GPU] == 8
    assert shared_memory(spec) == "128Gi"


def test_train_jobs_wait_in_the_gangs_queue() -> None:
    labels = job("train-gpu")["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "train"
    assert labels["prefect.io/flow-run-id"] == str(UUID(int=1))
    assert "kueue.x-k8s.io/queue-name" not in job("driver")["metadata"]["labels"]
